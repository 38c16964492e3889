"""Upscalers: workers that enlarge finished images, as the last stage of a request."""

from __future__ import annotations

from pydantic import Field

from ray_cluster.config.section import LIVE
from ray_cluster.config.sections.workers import WorkerConfig


class UpscalerConfig(WorkerConfig):
    """Replicas that enlarge finished images 2 or 4 times, by Lanczos interpolation: one entry at
    most, with as many replicas as are needed."""

    max_px: int = Field(
        4096,
        ge=64,
        le=16384,
        description="longest side of an enlarged image",
        json_schema_extra=LIVE,
    )
