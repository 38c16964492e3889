"""What a group's engine asks of its ranks, which are processes with the model and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.step.state import Conditioning

GuidanceRows = Literal["together", "apart"]
"""Whether a guided request's two model rows are on all ranks of a set, or one on either half."""


class RankDeltas(Mapping[nn.Module, Delta]):
    """What requests add to layers of a model that is elsewhere: ranks have it under a number.

    No layer of it is here, so it has none to iterate over; it counts as something all the same.
    """

    def __init__(self, number: int, num_layers: int) -> None:
        self.number = number
        self._num_layers = num_layers

    def __getitem__(self, layer: nn.Module) -> Delta:
        raise KeyError(layer)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())

    def __len__(self) -> int:
        return self._num_layers

    # two are alike only if they are one
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, slots=True)
class RankStep:
    """One denoising step of one request on a set of ranks.

    Attributes:
        call: number of the step; another one with each.
        key: of what the ranks keep of the request; see :meth:`Ranks.keep`.
        latent_hw: height and width of its latents.
        latents: ``[M, C]`` float32, a row per latent pixel, already scaled for the model.
    """

    call: int
    key: int
    ranks: range
    rows: GuidanceRows
    latent_hw: tuple[int, int]
    latents: Tensor
    timestep: float
    guidance_scale: float


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How a step ended.

    Attributes:
        seconds: from its beginning until its prediction was here.
        prediction: ``[M, C]`` float32, after guidance; None if the ranks were lost with it.
        is_suspect: whether it may be why they were lost: it was on the rank that was lost first.
    """

    call: int
    seconds: float
    prediction: Tensor | None
    is_suspect: bool = False


class Ranks(Protocol):
    """The ranks of a group as its step thread sees them; nothing here waits, but for :meth:`bind`.

    Ranks that were lost come back with all that they are to keep.
    """

    @property
    def num_ranks(self) -> int:
        """Ranks, numbered from 0."""

    @property
    def is_up(self) -> bool:
        """Whether all of them are there. What a step is begun on otherwise, is lost."""

    @property
    def has_news(self) -> bool:
        """Whether steps have ended, or the ranks have come back, since :meth:`ends`."""

    def keep(self, conditioning: Conditioning, deltas: LayerDeltas | None) -> int:
        """Have all ranks keep what a request's steps are conditioned on; return its key."""

    def forget(self, key: int) -> None:
        """Have the ranks forget a request."""

    def bind(self, deltas: Mapping[str, Delta]) -> RankDeltas:
        """Have all ranks bind deltas to their model, and wait for that.

        Raises:
            ModelUnsupported: a path names no layer of the model.
        """

    def begin(self, step: RankStep) -> None:
        """Begin a step on ranks that have none."""

    def ends(self) -> Sequence[StepEnd]:
        """Return the steps that have ended since the last call."""
