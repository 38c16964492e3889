"""The settings of a baseline: how it batches, what it refuses, and where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from benchmarks.harness import MODEL
from ray_cluster.config.section import Section
from ray_cluster.config.sections.cell_wide import RayConfig

Batching = Literal["one-by-one", "static"]


class BaselineSettings(Section):
    """One baseline service, as it stands in a file."""

    batching: Batching
    is_guarded: bool = Field(
        description="whether the queue is bounded, with 429 beyond, and what can't be in time any "
        "more is dropped before work"
    )
    http_port: int
    ray: RayConfig
    model: str = MODEL
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_batch: int = Field(8, description="of static batches")
    wait_s: float = Field(
        0.02, description="for which an idle replica waits for more images of the same kind"
    )
    alone_s: Mapping[str, float] = Field(
        {}, description="seconds of an image alone by its shape, for the deadline drop"
    )


def shape_name(width_px: int, height_px: int, num_steps: int) -> str:
    """Return the key under which times of such images are stored."""
    return f"{width_px}x{height_px}/{num_steps}"
