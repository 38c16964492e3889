"""ControlNets: which there are, for which models, and where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from ray_cluster.config.sections.cell_wide import Section
from ray_cluster.policies.costs.number_formats import NumberFormat

CONTROLNET_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


class ControlNetArguments(Section):
    """What the processes that run a ControlNet are started with."""

    name: str = Field(
        pattern=CONTROLNET_NAME,
        description="name by which calls choose it, and of a service's Serve application",
    )
    model: str = Field(
        min_length=1,
        description="a built-in ControlNet, a folder with diffusers' files of one, or a hub id",
    )
    bases: tuple[str, ...] = Field(
        min_length=1, description="models of pools (as calls name them) that it is made for"
    )
    mode: Literal["service", "local"] = Field(
        "service",
        description="whether it runs in processes of its own, which all replicas share, or in "
        "those of its bases' replicas; the images are the same",
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="where a service runs; `cuda` needs `num_gpus`"
    )
    dtype: NumberFormat | None = Field(
        None, description="number format of a service; null as for pools. Locally it is the base's"
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for a replica")
    num_gpus: float = Field(
        0.0, ge=0, le=1, description="part of a GPU that Ray reserves for a replica"
    )
    num_threads: int = Field(1, ge=1, description="torch's threads in a replica")
    max_cached_mib: int = Field(
        512,
        ge=1,
        description="what a replica keeps of prompts and maps; what is dropped is sent again",
    )

    @model_validator(mode="after")
    def _check_device(self) -> ControlNetArguments:
        if self.device == "cuda" and self.num_gpus == 0:
            raise ValueError("device 'cuda' needs num_gpus > 0, such as 0.25")
        return self


class ControlNetTuning(Section):
    """The settings of a ControlNet."""

    max_batch: int = Field(
        8, ge=1, le=256, description="images whose steps a replica computes together at most"
    )
    description: str = Field(
        "",
        max_length=300,
        description="what its maps show and which detector makes them, as callers are told",
    )


class ControlNetConfig(ControlNetTuning, ControlNetArguments):
    """A network that makes images follow a map: edges, blocks of colour, depth."""

    replicas: int = Field(1, ge=1, description="replicas at the start, of a service")

    @property
    def is_service(self) -> bool:
        """Whether it has an application of its own."""
        return self.mode == "service"


def check_controlnets(
    controlnets: Sequence[ControlNetConfig], *, models: Sequence[str], applications: Sequence[str]
) -> None:
    """Raise ValueError unless names differ and the bases are there.

    Args:
        models: that pools serve.
        applications: names of all others.
    """
    names = [*applications, *(one.name for one in controlnets)]
    for one in controlnets:
        if names.count(one.name) > 1:
            raise ValueError(
                f"ControlNet {one.name}: another ControlNet or application has this name; rename it"
            )
        unknown = [base for base in one.bases if base not in models]
        if unknown:
            raise ValueError(
                f"ControlNet {one.name}: there is no model {unknown[0]!r} in `pools`; there are "
                f"{', '.join(sorted(set(models)))}"
            )
