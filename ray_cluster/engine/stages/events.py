"""What an engine runner tells its owner."""

from __future__ import annotations

from dataclasses import dataclass

from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepReport
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.requests import ImageRequest, Timing


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request is through the runner: its pixels, ``[H, W, 3]`` uint8.

    Attributes:
        steps_by_degree: of a group: numbers of ranks with the steps that were taken on them.
    """

    request: ImageRequest
    pixels: Pixels
    timing: Timing
    steps_by_degree: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Previewed:
    """What an unfinished request looks like: its pixels, ``[H, W, 3]`` uint8."""

    request: ImageRequest
    pixels: Pixels
    steps_done: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A request ended with an error of its own."""

    request: ImageRequest
    error: RequestFailed | InvalidRequest


@dataclass(frozen=True, slots=True)
class Stepped:
    """The engine took a denoising step."""

    report: StepReport


@dataclass(frozen=True, slots=True)
class Died:
    """A thread of the runner has ended of an error; what is in flight will not be finished."""

    thread: str
    error: Exception

    def __str__(self) -> str:
        return f"the {self.thread} thread has died of {type(self.error).__name__}: {self.error}"


RunnerEvent = Decoded | Previewed | Broken | Stepped | Died


@dataclass(frozen=True, slots=True)
class Exported:
    """A request taken out of a runner; ``state`` is None when it was not encoded yet."""

    request: ImageRequest
    state: RequestState | None
