"""ControlNets: which there are, for which models, and where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ray_cluster.config.section import CALLS, LIVE
from ray_cluster.config.sections.workers import Hardware, WorkerConfig
from ray_cluster.policies.costs.number_formats import NumberFormat


class ControlNetConfig(Hardware, WorkerConfig):
    """A network that makes images follow a map: edges, blocks of colour, depth."""

    model: str = Field(
        min_length=1,
        description="a built-in ControlNet, a folder with diffusers' files of one, or a hub id",
    )
    bases: tuple[str, ...] = Field(
        min_length=1,
        description="models of pools (as calls name them) that it is made for",
        json_schema_extra=CALLS,
    )
    mode: Literal["service", "local"] = Field(
        "service",
        description="whether it runs in processes of its own, which all replicas share, or in "
        "those of its bases' replicas; the images are the same",
        json_schema_extra=CALLS,
    )
    dtype: NumberFormat | None = Field(
        None, description="number format of a service; null as for pools. Locally it is the base's"
    )
    max_cached_mib: int = Field(
        512,
        ge=1,
        description="what a replica keeps of prompts and maps; what is dropped is sent again",
    )
    max_batch: int = Field(
        8,
        ge=1,
        le=256,
        description="images whose steps a replica computes together at most",
        json_schema_extra=LIVE,
    )
    description: str = Field(
        "",
        max_length=300,
        description="what its maps show and which detector makes them, as callers are told",
        json_schema_extra=LIVE,
    )

    @property
    def is_service(self) -> bool:
        """Whether it has an application of its own."""
        return self.mode == "service"


def check_controlnets(controlnets: Sequence[ControlNetConfig], models: Sequence[str]) -> None:
    """Raise ValueError unless the bases are there.

    Args:
        models: that pools serve.
    """
    for one in controlnets:
        unknown = [base for base in one.bases if base not in models]
        if unknown:
            raise ValueError(
                f"ControlNet {one.name}: there is no model {unknown[0]!r} in `pools`; there are "
                f"{', '.join(sorted(set(models)))}"
            )
