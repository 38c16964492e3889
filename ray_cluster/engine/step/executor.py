"""What the step engine asks of a model: one call over a batch of any sizes, in two halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.batch.token_layout import TokenLayout
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.policies.steps.reuse import ActivePatches

PreparedT = TypeVar("PreparedT")
EncodedT = TypeVar("EncodedT")


class KeptRow(NamedTuple):
    """What a model made of a model row within a ring of its blocks.

    Attributes:
        made: ``[n, C]`` matrices, what comes out of the ring.
        tokens: ``[n, ...]`` each, what the blocks asked of other tokens than a token's own, in the
            order in which they did (keys and values, what convolutions and group norms look at);
            empty where whole blocks are reused.
    """

    made: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...] = ()


Activations = tuple[KeptRow, ...]
"""What was kept of a request: per model row."""


@dataclass(slots=True)
class RowReuse:
    """A request's part in a step of which something is kept, or was.

    Attributes:
        num_outer: blocks at either end of the model around what is kept.
        kept: what its last full step made within them and this one takes over; None in a full step.
        fresh: what this step makes within them, set by the executor in a full step.
        is_by_patch: whether a step that takes it over computes some patches within them, and so
            needs what the others' tokens were asked for.
        active: these patches; None for none, and in a full step.
    """

    num_outer: int
    kept: Activations | None = None
    fresh: Activations | None = None
    is_by_patch: bool = False
    active: ActivePatches | None = None


@dataclass(frozen=True, slots=True)
class StepBatch(Generic[PreparedT]):
    """The requests of one denoising step, in the order of their layout.

    Attributes:
        layout: where their pixels lie.
        latents: ``[M, C + K]`` float32, a row per pixel, already scaled for the model; K values are
            conditions that inpainting models take beside them.
        timesteps: ``[B]`` float32, each request's own.
        prepared: per request what the executor made of its conditioning.
        guidance_scales: ``[B]`` float32; used where the layout says that a request is guided.
        num_calls: model calls that the step takes, of which this is one.
        reuse: per request its part in reuse; None for those that reuse nothing and keep nothing,
            and empty where all are like that.
        deltas: per request what it adds to the outputs of layers, and empty where none does.
    """

    layout: TokenLayout
    latents: Tensor
    timesteps: Tensor
    prepared: tuple[PreparedT, ...]
    guidance_scales: Tensor
    num_calls: int = 1
    reuse: tuple[RowReuse | None, ...] = ()
    deltas: tuple[LayerDeltas | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Residuals:
    """What ControlNets add between the halves, matrices of the layout's levels; zeros for rows that
    have none.

    Attributes:
        down: one ``[N, C]`` per skip connection, the one nearest to the latents first.
        mid: ``[N, C]``.
    """

    down: tuple[Tensor, ...]
    mid: Tensor


class Executor(Protocol, Generic[PreparedT, EncodedT]):
    """A model on a set of ranks, called once per denoising step.

    ``encode_half`` runs the down and mid blocks; what it returns goes into ``decode_half``, which
    runs the up blocks and applies guidance. Residuals may arrive between the halves
    (SwiftDiffusion §4.1); batches in which rows reuse something have none.
    """

    @property
    def device(self) -> torch.device:
        """Where latents must be."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes, and of the factors that :meth:`bind` takes."""

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""

    @property
    def num_conditions(self) -> int:
        """Channels that it takes beside the latents: of inpainting models a mask and the latents of
        what it spares, else none.
        """

    @property
    def num_outer(self) -> range:
        """Numbers of outer blocks within which it can keep and reuse what it makes."""

    @property
    def patch_multiple(self) -> int:
        """What the side of a patch must be a multiple of."""

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""

    @property
    def layers(self) -> Mapping[str, nn.Linear | nn.Conv2d]:
        """The layers that :meth:`bind` knows, by their path in diffusers' model."""

    def bind(self, deltas: Mapping[str, Delta]) -> LayerDeltas:
        """Return deltas for requests of this model.

        Args:
            deltas: by the path of a layer in diffusers' model.

        Raises:
            ModelUnsupported: a path names no layer that can have one.
        """

    def merged(self, deltas: LayerDeltas) -> MergedWeights:
        """Return the model's weights with a request's deltas in them, none of them made yet.

        Layers that :meth:`prepare` alone calls keep their weights: once an image, their deltas
        cost little.

        Raises:
            ModelUnsupported: these deltas, or this model, cannot be merged.
        """

    def prepare(self, conditioning: Conditioning, deltas: LayerDeltas | None = None) -> PreparedT:
        """Compute what stays the same in all steps of a request, with what it adds to layers."""

    def encode_half(self, batch: StepBatch[PreparedT]) -> EncodedT:
        """Run the first half and return what the second half needs."""

    def cut(
        self, encoded: EncodedT, batch: StepBatch[PreparedT], keeps: Sequence[bool]
    ) -> EncodedT:
        """Return what the second half needs of some of a batch's requests; none of them reuses.

        Args:
            batch: of these alone.
            keeps: of each request of the first half's batch, whether it is one of them.

        Raises:
            ModelUnsupported: the model takes no residuals.
        """

    def decode_half(self, encoded: EncodedT, residuals: Residuals | None = None) -> Tensor:
        """Return the prediction after guidance, ``[M, C]`` float32.

        Raises:
            ModelUnsupported: the model takes no residuals.
            ValueError: there are residuals of another number, or for a batch in which rows reuse.
        """
