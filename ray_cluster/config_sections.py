"""The parts of the configuration, one class for each section of the file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from ray_cluster.policies.fidelity import LEAST_SSIM, FewerSteps, StepTable
from ray_cluster.requests import SamplerName


class Section(BaseModel):
    """A mapping that cannot be changed and in which nothing is unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpConfig(Section):
    """Where the service listens and who may call it."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    num_gateways: int = Field(1, ge=1, le=64)
    keep_alive_s: int = Field(90, ge=1, description="age at which an idle connection is closed")
    api_keys: tuple[SecretStr, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the port may use the service."""
        return not self.api_keys

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the port."""
        return self.host in {"127.0.0.1", "localhost", "::1"}


class RayConfig(Section):
    """How to reach Ray: an address, or the ports of a local one that ``serve`` starts."""

    address: str | None = None
    auth: Literal["token", "disabled"] = Field(
        "token", description="whether Ray's own ports ask for its token; they are not only local"
    )
    num_cpus: int | None = Field(None, ge=1)
    object_store_mib: int = Field(256, ge=80)
    include_dashboard: bool = True
    dashboard_host: str = "127.0.0.1"
    dashboard_port: int = Field(8265, ge=1, le=65535)
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="of Ray's own Prometheus endpoint; None lets Ray choose"
    )
    worker_port_range: tuple[int, int] | None = None
    temp_dir: str | None = None


class LimitsConfig(Section):
    """Bounds on what one request and all waiting requests together may take."""

    max_queued_images: int = Field(64, ge=1)
    max_images_per_request: int = Field(10, ge=1)
    max_header_bytes: int = Field(32 << 10, ge=1024, description="path and headers of a call")
    max_body_bytes: int = Field(1 << 20, ge=1024)
    max_body_s: float = Field(30.0, gt=0, description="time that a body may take to arrive")
    max_send_stall_s: float = Field(
        60.0, gt=0, description="time for which a client may leave its reply unread"
    )
    max_prompt_chars: int = Field(4000, ge=1)
    max_open_jobs_per_client: int = Field(1000, ge=1)
    max_attached_images_per_client: int = Field(
        1000,
        ge=1,
        description="waiting or being made for calls that wait; a client is an API key, or an "
        "address where there are none",
    )
    max_streams_per_client: int = Field(
        100, ge=1, description="event streams of jobs that a client may have open at one gateway"
    )
    max_stream_s: float = Field(
        3600.0, gt=0, description="age at which an event stream ends; clients take it up again"
    )

    @model_validator(mode="after")
    def _check(self) -> LimitsConfig:
        if self.max_attached_images_per_client < self.max_images_per_request:
            raise ValueError(
                f"max_attached_images_per_client {self.max_attached_images_per_client} is below "
                f"max_images_per_request {self.max_images_per_request}: a call for so many would "
                "never be served; raise the one or lower the other"
            )
        return self


class DispatchConfig(Section):
    """Time constants of the dispatcher, and its port."""

    default_slo_s: float = Field(60.0, gt=0)
    poll_s: float = Field(1.0, gt=0, description="longest time a lease poll is held open")
    progress_s: float = Field(
        0.25, gt=0, description="the same while the replica makes images of jobs: age of progress"
    )
    replica_timeout_s: float = Field(6.0, gt=0, description="silence after which a replica is dead")
    attached_timeout_s: float = Field(15.0, gt=0, description="the same of a client")
    patience_s: float = Field(3.0, gt=0, description="longest wait for the dispatcher's answer")
    port: int = Field(0, ge=0, le=65535, description="of the dispatcher; 0 takes a free one")
    max_attempts: int = Field(5, ge=1, description="lost leases after which a request ends")
    preemption: bool = Field(
        True,
        description="whether an image that is being made may give its place to one that would be "
        "late without it, and go on later, if neither it nor anybody else is late for that",
    )
    starvation_s: float = Field(
        600.0,
        gt=0,
        description="wait after which a request that is past its deadline comes before all others, "
        "whatever their priority",
    )


class StorageConfig(Section):
    """What outlives processes: jobs and their images, and what is done of images that are not yet
    finished. Relative folders start where ``serve`` is called."""

    jobs: str = Field(
        "sqlite:///.ray-cluster/jobs.db",
        description="sqlite:///file, or postgresql://user:password@host/database",
    )
    results: str = Field(
        ".ray-cluster/results", description="a folder, or an object store's URL (s3://...)"
    )
    states: str = Field(
        ".ray-cluster/states",
        description="where replicas leave unfinished images for others; likewise",
    )
    is_shared: bool = Field(
        False,
        description="whether all nodes see the same files at these paths, and these outlive each "
        "of them: without it, files are refused in a cluster of several nodes",
    )
    retention_s: float = Field(
        7 * 86400.0, gt=0, description="age at which jobs and images are forgotten"
    )
    max_results_mib: int | None = Field(
        10240, ge=1, description="size of all results above which the oldest are forgotten"
    )

    def resolved(self, folder: Path) -> StorageConfig:
        """Return it with absolute paths: its readers run in other working folders."""
        jobs = self.jobs
        kind, mark, path = jobs.partition(":///")
        if kind == "sqlite" and mark and path and path != ":memory:":
            jobs = f"sqlite:///{folder / path}"
        folders = {
            name: url if "://" in url else str(folder / Path(url).expanduser())
            for name, url in (("results", self.results), ("states", self.states))
        }
        return self.model_copy(update={"jobs": jobs} | folders)


class LogsConfig(Section):
    """What gateways, dispatcher and replicas write to their log files; docs/logs.md tells it."""

    format: Literal["text", "json"] = Field(
        "text", description="lines for a person to read, or one JSON object per line"
    )
    level: Literal["debug", "info", "warning", "error"] = "info"


class DefaultsConfig(Section):
    """What a request gets that does not say; None takes the model's own default."""

    size: str | None = Field(None, pattern=r"^\d+x\d+$")
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0)
    sampler: SamplerName | None = None


class FewerStepsConfig(Section):
    """How few steps will do where ``asked`` are asked for; what was measured of their images."""

    asked: int = Field(ge=1)
    balanced: int = Field(ge=1)
    fast: int = Field(ge=1)
    balanced_ssim: float = Field(
        LEAST_SSIM["balanced"], ge=LEAST_SSIM["balanced"], le=1, description="the worst image's"
    )
    fast_ssim: float = Field(LEAST_SSIM["fast"], ge=LEAST_SSIM["fast"], le=1)

    @model_validator(mode="after")
    def _check(self) -> FewerStepsConfig:
        if not self.fast <= self.balanced <= self.asked:
            raise ValueError(
                f"balanced must lie between fast and asked; given fast {self.fast}, balanced "
                f"{self.balanced}, asked {self.asked}"
            )
        return self


class FidelityConfig(Section):
    """What ``fidelity: balanced`` and ``fast`` mean for a model: fewer steps, as was measured.

    Nothing here is checked against the model: whoever gives it has measured it, with this sampler
    and up to this guidance scale. ``asked`` between two rows takes the one with more steps.
    """

    sampler: SamplerName
    max_guidance_scale: float = Field(ge=0)
    steps: tuple[FewerStepsConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> FidelityConfig:
        for before, after in pairwise(self.steps):
            if before.asked >= after.asked:
                raise ValueError(
                    f"steps must be ordered by asked; given {after.asked} after {before.asked}"
                )
            if before.balanced > after.balanced or before.fast > after.fast:
                raise ValueError(
                    f"where more steps are asked for, no fewer will do; given fewer for asked "
                    f"{after.asked} than for {before.asked}: raise the later ones"
                )
        return self

    def table(self) -> StepTable:
        """Return it for policies."""
        rows = tuple(FewerSteps(**row.model_dump()) for row in self.steps)
        return StepTable(self.sampler, self.max_guidance_scale, rows)


class PoolConfig(Section):
    """Replicas of one model on one kind of device: one Serve application.

    Attributes:
        name: name of the Serve application, and of the model at the API unless ``served_as``.
        model: built-in model name, diffusers folder or hub id.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    model: str
    served_as: str | None = None
    replicas: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    num_threads: int = Field(1, ge=1)
    max_batch: int = Field(8, ge=1)
    max_in_flight: int = Field(16, ge=1)
    batches: Literal["mixed", "one-size"] = Field(
        "mixed",
        description="whether images of several sizes share a denoising step; `one-size` is what "
        "other engines do, to compare with: predictions still reckon with `mixed`",
    )
    layout: Literal["auto", "mixed", "grouped"] = Field(
        "auto",
        description="whether the sizes of a step share one model call, or take one each; `auto` "
        "takes what is expected to be faster, by the steps so far",
    )
    min_px: int | None = Field(None, ge=8)
    max_px: int | None = Field(None, ge=8)
    max_num_inference_steps: int = Field(100, ge=1)
    memory_gib: float | None = Field(None, gt=0, description="budget; None takes what is free")
    offload: Literal["auto", "never"] = "auto"
    defaults: DefaultsConfig = DefaultsConfig()
    fidelity: FidelityConfig | None = Field(
        None,
        description="how few steps are balanced and fast; None takes what was measured of a "
        "built-in model, and refuses both with others",
    )

    @property
    def model_name(self) -> str:
        """Name of the model at the API."""
        return self.served_as or self.name

    @model_validator(mode="after")
    def _check(self) -> PoolConfig:
        if self.name == "front":
            raise ValueError(
                "pool name 'front' is taken by the gateway application; choose another"
            )
        if self.device == "cuda" and self.num_gpus == 0:
            raise ValueError("device 'cuda' needs num_gpus > 0 (1, or a fraction to share a GPU)")
        if self.max_batch > self.max_in_flight:
            raise ValueError(
                f"max_batch {self.max_batch} is above max_in_flight {self.max_in_flight}; "
                "raise max_in_flight or lower max_batch"
            )
        return self
