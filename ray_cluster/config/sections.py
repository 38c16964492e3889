"""The sections of the configuration that all pools share, one class for each."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

# the keys of `storage` that name a folder or an object store's URL
BLOB_FOLDERS = ("results", "states", "inputs")


class Section(BaseModel):
    """A mapping that cannot be changed and in which nothing is unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class HttpArguments(Section):
    """Where the service listens."""

    host: str = Field(
        "127.0.0.1", description="address to listen at; 0.0.0.0 for all of this machine's"
    )
    port: int = Field(8000, ge=1, le=65535)
    keep_alive_s: int = Field(90, ge=1, description="age at which an idle connection is closed")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the port."""
        return self.host in {"127.0.0.1", "localhost", "::1"}


class HttpConfig(HttpArguments):
    """Where the service listens and who may call it."""

    num_gateways: int = Field(
        1, ge=1, le=64, description="processes that answer calls; they keep no state"
    )
    api_keys: tuple[SecretStr, ...] = Field(
        (),
        description="who may call, beside the keys in RAY_CLUSTER_API_KEYS (comma-separated); "
        "anybody where there are none",
    )

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key is empty; nobody could call with it: leave it out")
        return keys

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the port may use the service."""
        return not self.api_keys


class RayConfig(Section):
    """How to reach Ray: an address, or the ports of a local one that ``serve`` starts."""

    address: str | None = Field(
        None, description="of a running Ray cluster; null starts a local one, to which the rest is"
    )
    auth: Literal["token", "disabled"] = Field(
        "token", description="whether Ray's own ports ask for its token; they are not only local"
    )
    num_cpus: int | None = Field(
        None, ge=1, description="that Ray may reserve; null takes all of the machine"
    )
    object_store_mib: int = Field(256, ge=80, description="memory of Ray's object store")
    include_dashboard: bool = Field(True, description="whether Ray's dashboard runs")
    dashboard_host: str = Field("127.0.0.1", description="address that it listens at")
    dashboard_port: int = Field(8265, ge=1, le=65535)
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="of Ray's own Prometheus endpoint; null lets Ray choose"
    )
    worker_port_range: tuple[int, int] | None = Field(
        None, description="first and last port of Ray's worker processes; null lets Ray choose"
    )
    temp_dir: str | None = Field(
        None, description="folder of Ray's own files; a short path: it holds sockets"
    )

    @field_validator("worker_port_range")
    @classmethod
    def _check_range(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and not 1024 <= ports[0] <= ports[1] <= 65535:
            raise ValueError(f"must be two ports from 1024 to 65535, rising; given {list(ports)}")
        return ports


class LimitsConfig(Section):
    """Bounds on what one request and all waiting requests together may take."""

    max_queued_images: int = Field(64, ge=1, description="that wait, over all models")
    max_images_per_request: int = Field(10, ge=1, description="`n` of a call")
    max_header_bytes: int = Field(32 << 10, ge=1024, description="path and headers of a call")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="of a call")
    max_body_s: float = Field(30.0, gt=0, description="time that a body may take to arrive")
    max_input_bytes: int = Field(
        50 << 20, ge=1024, description="of one image that a call sends, decoded from base64"
    )
    max_upload_bytes: int = Field(
        200 << 20, ge=1024, description="of a call that sends images as files (multipart)"
    )
    max_upload_s: float = Field(
        300.0, gt=0, description="time that the body of such a call may take to arrive"
    )
    max_send_stall_s: float = Field(
        60.0, gt=0, description="time for which a client may leave its reply unread"
    )
    max_prompt_chars: int = Field(
        4000, ge=1, description="of a prompt; the model's own bound in tokens is checked, too"
    )
    max_open_jobs_per_client: int = Field(
        1000, ge=1, description="jobs of an API key that have not ended"
    )
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
        if self.max_upload_bytes < self.max_input_bytes:
            raise ValueError(
                f"max_upload_bytes {self.max_upload_bytes} is below max_input_bytes "
                f"{self.max_input_bytes}: no call could send so large an image; raise the one or "
                "lower the other"
            )
        return self


class DispatchSettings(Section):
    """Time constants of the dispatcher."""

    default_slo_s: float = Field(
        60.0, gt=0, description="deadline of a call that gives none (`slo_s`)"
    )
    poll_s: float = Field(1.0, gt=0, description="longest time a lease poll is held open")
    progress_s: float = Field(
        0.25, gt=0, description="the same while the replica makes images of jobs: age of progress"
    )
    replica_timeout_s: float = Field(6.0, gt=0, description="silence after which a replica is dead")
    attached_timeout_s: float = Field(15.0, gt=0, description="the same of a client")
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

    @model_validator(mode="after")
    def _check_times(self) -> DispatchSettings:
        if self.poll_s >= self.replica_timeout_s:
            raise ValueError(
                f"poll_s {self.poll_s:g} is not below replica_timeout_s "
                f"{self.replica_timeout_s:g}: every replica would be taken for dead; lower poll_s"
            )
        return self


class DispatchArguments(Section):
    """Where the dispatcher listens, and for how long it is waited for."""

    patience_s: float = Field(3.0, gt=0, description="longest wait for the dispatcher's answer")
    port: int = Field(0, ge=0, le=65535, description="of the dispatcher; 0 takes a free one")


class DispatchConfig(DispatchSettings, DispatchArguments):
    """Time constants of the dispatcher, and its port."""


class StorageSettings(Section):
    """How much of the jobs and their images is kept, and for how long."""

    retention_s: float = Field(
        7 * 86400.0, gt=0, description="age at which jobs and images are forgotten"
    )
    max_results_mib: int | None = Field(
        10240, ge=1, description="size of all results above which the oldest are forgotten"
    )


class StorageArguments(Section):
    """Where that is kept, and what is done of unfinished images, and images that calls send.

    Relative folders start where ``serve`` is called.
    """

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
    inputs: str = Field(
        ".ray-cluster/inputs",
        description="where gateways store the images that calls send; likewise, and of this cell "
        "alone: its dispatcher deletes what none of its own requests uses",
    )
    inputs_grace_s: float = Field(
        3600.0,
        ge=600,
        description="age from which such an image is deleted, unless a request that has not ended "
        "uses it; it may stay up to three times as long",
    )
    is_shared: bool = Field(
        False,
        description="whether all nodes see the same files at these paths, and these outlive each "
        "of them: without it, files are refused in a cluster of several nodes",
    )

    @field_validator("jobs")
    @classmethod
    def _check_jobs(cls, url: str) -> str:
        if re.match(r"(sqlite:///|postgresql(\+psycopg)?://).", url) is None:
            raise ValueError("must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE")
        return url

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        for one, other in combinations(BLOB_FOLDERS, 2):
            url = getattr(self, one)
            if url.rstrip("/") == getattr(self, other).rstrip("/"):
                raise ValueError(f"{one} and {other} must be different places, given {url!r}")
        return self

    def resolved(self, folder: Path) -> Self:
        """Return it with absolute paths: its readers run in other working folders."""
        jobs = self.jobs
        kind, mark, path = jobs.partition(":///")
        if kind == "sqlite" and mark and path and path != ":memory:":
            jobs = f"sqlite:///{folder / path}"
        urls = {name: getattr(self, name) for name in BLOB_FOLDERS}
        folders = {
            name: url if "://" in url else str(folder / Path(url).expanduser())
            for name, url in urls.items()
        }
        return self.model_copy(update={"jobs": jobs} | folders)


class StorageConfig(StorageSettings, StorageArguments):
    """What outlives processes: jobs and their images, and what is done of images that are not yet
    finished. Relative folders start where ``serve`` is called."""


class LogsConfig(Section):
    """What gateways, dispatcher and replicas write to their log files; docs/logs.md tells it."""

    format: Literal["text", "json"] = Field(
        "text", description="lines for a person to read, or one JSON object per line"
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe lines that are written"
    )
