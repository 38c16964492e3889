"""What a step asks of ControlNets, and what it gets, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ray_cluster.engine.step.state import Conditioning


@dataclass(frozen=True, slots=True, eq=False)
class ControlNetAsk:
    """The residuals of one ControlNet for one step of a request.

    Attributes:
        name: of the ControlNet.
        key: of the request and its use of it; the same in all its steps, and no other's.
        conditioning: of the request, the same in all its steps.
        map: ``[H, W, 3]`` uint8 on the CPU, likewise; of the size of the image.
        latents: ``[C, h, w]`` float32, scaled for the model.
        timestep: of the model's own schedule.
        deadline_s: of the request, on the engine's clock.
    """

    name: str
    key: str
    conditioning: Conditioning
    map: Tensor
    latents: Tensor
    timestep: float
    deadline_s: float


@dataclass(frozen=True, slots=True, eq=False)
class RowResiduals:
    """What a ControlNet adds to one request between the halves of a step, at a scale of 1.

    Attributes:
        down: ``[R * h * w, C]`` for each skip connection, the one nearest to the latents first; of
            the request's R model rows, with guidance the unconditional one's first.
        mid: likewise.
    """

    down: tuple[Tensor, ...]
    mid: Tensor


class ControlNetBackend(Protocol):
    """ControlNets, wherever they run."""

    def ask(self, asks: Sequence[ControlNetAsk]) -> Sequence[Future[RowResiduals]]:
        """Begin to compute; return what will hold the results.

        A future raises :class:`ray_cluster.errors.RequestFailed` with stage ``control`` where there
        will be none, such as when nobody serves the ControlNet until the request's deadline. One
        that is cancelled is not needed any more. Only the step thread calls this.
        """

    def call_when_ready(self, wake: Callable[[], None]) -> None:
        """Have something called after each future that is set later, from another thread."""

    def forget(self, key: str) -> None:
        """Drop what is kept under a key: the request has left this engine."""

    def usual_s(self, name: str) -> float:
        """Return the seconds that an answer of a ControlNet usually takes; 0 if that is unknown."""
