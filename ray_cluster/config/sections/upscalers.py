"""Upscalers: workers that enlarge finished images, as the last stage of a request."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ray_cluster.config.section import CALLS
from ray_cluster.config.sections.workers import WorkerConfig


class UpscalerConfig(WorkerConfig):
    """Replicas that enlarge finished images 2 or 4 times, by Lanczos interpolation."""

    max_px: int = Field(
        4096,
        ge=64,
        le=16384,
        description="longest side of an enlarged image",
        json_schema_extra=CALLS,
    )

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.device != "cpu" or self.num_gpus:
            raise ValueError("an upscaler runs on a CPU: leave out device and num_gpus")
        return self
