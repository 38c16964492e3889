"""What a model's replica asks of whatever makes its images: an engine, or calls of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.merging import Merger
from ray_cluster.engine.stages.events import Exported, RunnerEvent
from ray_cluster.engine.step.state import RequestState
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest


class Runs(Protocol):
    """Requests in, pixels out; each method as of :class:`.EngineRunner`."""

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def merger(self) -> Merger | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def step_cost(self) -> StepCost: ...
    @property
    def steps_done_by_id(self) -> dict[str, int]: ...
    @property
    def steps_between_exports(self) -> int | None: ...
    @property
    def add_loras(self) -> Callable[[str, AdapterSet], None]: ...
    @property
    def export(self) -> Callable[[str], Future[Exported | None]]: ...
    def start(self, on_event: Callable[[RunnerEvent], None]) -> None: ...
    def stop(self) -> None: ...
    def check_alive(self, max_silence_s: float) -> None: ...
    def set_max_batch(self, wanted: int, /) -> int: ...
    def submit(
        self,
        request: ImageRequest,
        *,
        deadline_s: float,
        queued_s: float = 0.0,
        read_s: float = 0.0,
        state: RequestState | None = None,
        pixels: SentPixels | None = None,
        adapters: AdapterSet | None = None,
        maps: tuple[Tensor, ...] = (),
    ) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def export_all(self) -> Sequence[Exported]: ...
