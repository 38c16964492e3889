"""What all sections share that become Serve applications of workers."""

from __future__ import annotations

from math import ceil
from typing import Literal, Self

from pydantic import Field, model_validator

from ray_cluster.config.section import CALLS, COUNT, LIVE, RESOURCE_NAME, Section

APPLICATION_NAME = r"^[a-z0-9][a-z0-9._-]{0,127}$"
# applications of the service itself
RESERVED_NAMES = ("front", "loras", "controller")


class Hardware(Section):
    """What replicas run on that compute with torch."""

    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="where it runs; `cuda` needs `num_gpus`"
    )
    num_gpus: float = Field(
        0.0,
        ge=0,
        description="GPUs that Ray reserves for a replica, at most 1; with fractions, replicas "
        "share one, and each is held to its part of the memory",
    )
    num_threads: int = Field(1, ge=1, description="torch's threads in a replica")

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.device == "cuda" and self.num_gpus == 0:
            raise ValueError("device 'cuda' needs num_gpus > 0 (1, or a fraction to share a GPU)")
        if self.num_gpus > 1:
            raise ValueError(
                f"num_gpus is {self.num_gpus:g}, but a replica runs on one GPU: set num_gpus: 1, "
                f"and replicas: {ceil(self.num_gpus)} to use as many GPUs"
            )
        return self


class WorkerConfig(Section):
    """Replicas that do one kind of work: one Serve application."""

    name: str = Field(
        pattern=APPLICATION_NAME,
        description="name of the Serve application, by which calls and other sections name it (a "
        "pool's model by `served_as`, where that is given); `front`, `loras` and `controller` are "
        "reserved",
        json_schema_extra=CALLS,
    )
    num_cpus: float = Field(
        1.0,
        ge=0,
        description="CPUs that Ray reserves for a replica, which is not confined to them; what a "
        "busy one takes, where a controller plans replicas on CPUs",
    )
    node_resource: str | None = Field(
        None,
        pattern=RESOURCE_NAME,
        description="custom resource of the Ray nodes that replicas run on, such as those of one "
        "kind of GPU (`ray start --resources '{\"h100\": 1}'`); null: on any",
    )
    replicas: int = Field(1, ge=1, description="replicas at the start", json_schema_extra=COUNT)
    surge: bool = Field(
        False,
        description="whether a replica that is replaced serves until its successor has loaded, "
        "which needs room for one more; while there is none, a redeploy waits and the earlier "
        "replicas serve on. Without it, an earlier one stops first",
        json_schema_extra=COUNT,
    )

    max_batch: int = Field(
        8,
        ge=1,
        description="images that a replica works on together at most; memory may allow fewer",
        json_schema_extra=LIVE,
    )

    @property
    def most_in_flight(self) -> int:
        """Images that a replica holds at most."""
        return self.max_batch

    @property
    def hardware(self) -> Hardware:
        """What a replica runs on; one thread of a CPU, where there is nothing to choose."""
        own: object = self
        return own if isinstance(own, Hardware) else Hardware()

    @property
    def num_processes(self) -> int:
        """Processes of a replica that compute."""
        return 1

    @property
    def reserved_cpus(self) -> float:
        """CPUs that Ray reserves for a replica."""
        return self.num_processes * self.num_cpus

    @property
    def reserved_gpus(self) -> float:
        """GPUs likewise."""
        return self.num_processes * self.hardware.num_gpus

    @property
    def is_service(self) -> bool:
        """Whether it has an application of its own."""
        return True

    @model_validator(mode="after")
    def _check_worker(self) -> Self:
        if self.name in RESERVED_NAMES:
            raise ValueError(
                f"the name {self.name!r} is taken by an application of the service; choose another"
            )
        return self
