"""The settings of a baseline: how it batches, what it refuses, and where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.harness import MODEL
from ray_cluster.config.section import Section
from ray_cluster.config.sections.cell_wide import RayConfig

Batching = Literal["one-by-one", "static"]

# requests in the replica, where they can be grouped and dropped, before Serve's own queue fills:
# its router knows nothing of sizes and deadlines
_IN_REPLICA = 32
_IN_ROUTER = 32
_UNBOUNDED = 10_000


class BaselineSettings(Section):
    """One baseline service, as it stands in a file."""

    batching: Batching
    is_guarded: bool = Field(
        description="whether the queue is bounded, with 429 beyond, and what can't be in time any "
        "more is dropped before work"
    )
    http_port: int = Field(ge=1, le=65535)
    ray: RayConfig
    model: str = MODEL
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_batch: int = Field(8, ge=1, description="of static batches")
    wait_s: float = Field(
        0.02, ge=0, description="for which an idle replica waits for more images of the same kind"
    )
    alone_s: Mapping[str, float] = Field(
        {}, description="seconds of an image alone by its shape, for the deadline drop"
    )

    @property
    def max_ongoing(self) -> int:
        """Requests that Serve sends to the replica at once."""
        return _IN_REPLICA if self.is_guarded else _UNBOUNDED

    @property
    def max_queued(self) -> int:
        """Requests in the queue of Serve's router; more are refused. -1 for any number."""
        return _IN_ROUTER if self.is_guarded else -1

    @classmethod
    def read(cls, path: Path) -> BaselineSettings:
        """Read a file."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def shape_name(width_px: int, height_px: int, num_steps: int) -> str:
    """Return the key under which times of such images are stored."""
    return f"{width_px}x{height_px}/{num_steps}"
