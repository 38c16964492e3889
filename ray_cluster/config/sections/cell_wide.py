"""The sections of the configuration that all pools share, one class for each."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ray_cluster.config.section import (
    FRONT,
    LIVE,
    REDEPLOY,
    RESOURCE_NAME,
    Section,
    absolute,
    changed,
)
from ray_cluster.errors import ConfigError

# the keys of `storage` that name a folder or an object store's URL
BLOB_FOLDERS = ("results", "states", "inputs")
_JOB_STORE = re.compile(r"(sqlite:///|postgresql(\+psycopg)?://).")
_WANTED_JOB_STORE = "must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"


class RayConfig(Section):
    """How to reach Ray: an address, or the ports of a local one that ``serve`` starts."""

    address: str | None = Field(
        None, description="address of a running Ray; null starts a local one with the other keys"
    )
    auth: Literal["token", "disabled"] = Field(
        "token", description="whether Ray's ports, which other machines reach, ask for a token"
    )
    num_cpus: int | None = Field(
        None, ge=1, description="number of CPUs that Ray may reserve; null for all of the machine"
    )
    object_store_mib: int = Field(256, ge=80, description="size of Ray's object store in memory")
    include_dashboard: bool = Field(True, description="whether Ray's dashboard runs")
    dashboard_host: str = Field("127.0.0.1", description="address of the dashboard")
    dashboard_port: int = Field(8265, ge=1, le=65535, description="port of the dashboard")
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="port of Ray's Prometheus endpoint; null lets Ray choose"
    )
    temp_dir: str | None = Field(
        None, description="folder of Ray's own files; a short path, because it holds sockets"
    )


class LimitsConfig(Section):
    """Limits of one call, of one client and of the queue."""

    APPLIED = "live"

    max_queued_images: int = Field(
        500,
        ge=1,
        description="images of one client in the queue of a model, or waiting for their LoRAs and "
        "ControlNets; divided by the clients that wait there",
    )
    max_queue_s: float = Field(
        300.0,
        gt=0,
        description="time that the replicas of a model may need for what one client has in its "
        "queue, likewise divided; one call always fits",
    )
    max_images_per_request: int = Field(10, ge=1, description="images of one call (`n`)")
    max_header_bytes: int = Field(32 << 10, ge=1024, description="size of path and headers")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="size of the body of a call")
    max_body_s: float = Field(30.0, gt=0, description="time in which a body must arrive")
    max_input_bytes: int = Field(
        50 << 20, ge=1024, description="size of one image in a call, after decoding base64"
    )
    max_input_pixels: int = Field(64 << 20, ge=1, le=10**8, description="pixels of one such image")
    max_upload_bytes: int = Field(
        200 << 20, ge=1024, description="size of a call that sends images, in a form or in JSON"
    )
    max_upload_s: float = Field(
        300.0, gt=0, description="time in which the body of such a call must arrive"
    )
    max_stored_bytes_per_client: int = Field(
        10 << 30,
        ge=1024,
        description="size of the images of one client that one gateway has stored and that are not "
        "to be deleted yet (storage.inputs_grace_s), each counted as 64 KiB at least",
    )
    max_send_stall_s: float = Field(
        60.0, gt=0, description="time after which a client that does not read its reply is cut off"
    )
    max_prompt_chars: int = Field(
        4000, ge=1, description="length of a prompt; the model's own limit in tokens applies too"
    )
    max_open_jobs_per_client: int = Field(1000, ge=1, description="unfinished jobs of one client")
    max_attached_images_per_client: int = Field(
        1000,
        ge=1,
        description="unfinished images of calls that wait for them, of one client: that of an API "
        "key, or an address where there are no keys",
    )
    max_streams_per_client: int = Field(
        100, ge=1, description="open event streams of jobs of one client at one gateway"
    )
    max_stream_s: float = Field(
        3600.0, gt=0, description="age at which an event stream ends; clients open it again"
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
        if self.max_stored_bytes_per_client < self.max_upload_bytes:
            raise ValueError(
                f"max_stored_bytes_per_client {self.max_stored_bytes_per_client} is below "
                f"max_upload_bytes {self.max_upload_bytes}: the images of the largest call could "
                "not be stored; raise the one or lower the other"
            )
        return self


class DispatchConfig(Section):
    """The dispatcher: times, deadlines, preemption, and its port."""

    APPLIED = "live"

    patience_s: float = Field(
        3.0,
        gt=0,
        description="longest wait for the dispatcher to answer",
        json_schema_extra=REDEPLOY,
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of the dispatcher; 0 for any free one",
        json_schema_extra=FRONT,
    )
    service: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9./_-]{0,127}$",
        description="name of the service in its job store. While an earlier Ray cluster of that "
        "name serves, a later one stands by, and takes over once all its workers are ready; null: "
        "it does not start then",
        json_schema_extra=FRONT,
    )
    front_resource: str | None = Field(
        None,
        pattern=RESOURCE_NAME,
        description="custom resource of the Ray nodes that dispatcher, gateways and controller run "
        "on (`ray start --resources '{\"front\": 1}'`), such as nodes that no scaling takes away; "
        "null: on any",
        json_schema_extra=FRONT,
    )
    default_slo_s: float = Field(60.0, gt=0, description="deadline of calls without `slo_s`")
    poll_s: float = Field(1.0, gt=0, description="longest time that a replica's poll is held open")
    progress_s: float = Field(
        0.25, gt=0, description="the same while it makes images of jobs, to report progress"
    )
    replica_timeout_s: float = Field(6.0, gt=0, description="silence after which a replica is dead")
    attached_timeout_s: float = Field(
        15.0, gt=0, description="silence of a waiting client after which its images are cancelled"
    )
    model_lost_s: float = Field(
        120.0,
        gt=0,
        description="time without a replica of a model after which calls for it are refused, and "
        "end if they wait; jobs go on waiting, and so does all while a controller starts one",
    )
    max_attempts: int = Field(
        5, ge=1, description="attempts on replicas that died, after which a request fails"
    )
    preemption: bool = Field(
        True,
        description="whether a running image may be interrupted and resumed later, so that another "
        "one meets its deadline; never if that makes any image late",
    )
    starvation_s: float = Field(
        600.0,
        gt=0,
        description="waiting time after which a request past its deadline goes before all others, "
        "whatever their priority",
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.poll_s >= self.replica_timeout_s:
            raise ValueError(
                f"poll_s {self.poll_s:g} is not below replica_timeout_s "
                f"{self.replica_timeout_s:g}: every replica would be taken for dead; lower poll_s"
            )
        return self


class StorageConfig(Section):
    """Where jobs and images are stored, and for how long. Relative folders start where ``serve`` is
    called."""

    # the URLs may hold passwords, so they are in no repr and no error

    jobs: str = Field(
        "sqlite:///.ray-cluster/jobs.db",
        repr=False,
        description="sqlite:///file, or postgresql://user:password@host/database",
        json_schema_extra=FRONT,
    )
    jobs_file: str | None = Field(
        None,
        description="absolute path of a file with that URL, on the dispatcher's machine, in place "
        "of `jobs`: a mounted Secret of Kubernetes",
        json_schema_extra=FRONT,
    )
    results: str = Field(
        ".ray-cluster/results",
        repr=False,
        description="finished images: a folder, or an object store's URL; not shared with another "
        "service, as what nobody here knows is deleted",
    )
    states: str = Field(
        ".ray-cluster/states",
        repr=False,
        description="states of unfinished images, from which other replicas resume: likewise",
    )
    inputs: str = Field(
        ".ray-cluster/inputs",
        repr=False,
        description="images that calls send: likewise, and not shared with another service: those "
        "that no request uses are deleted",
    )
    inputs_grace_s: float = Field(
        3600.0,
        ge=600,
        description="age at which such an image is deleted unless an unfinished request uses it; "
        "it may stay up to three times as long",
    )
    is_shared: bool = Field(
        False,
        description="whether these folders are on a disk that all nodes share and that outlives "
        "each of them; otherwise folders are refused in a cluster of several nodes",
    )
    retention_s: float = Field(
        7 * 86400.0,
        gt=0,
        description="age at which jobs and their images are deleted",
        json_schema_extra=LIVE,
    )
    max_results_mib: int | None = Field(
        10240,
        ge=1,
        description="size of results above which the oldest are deleted; null for no limit",
        json_schema_extra=LIVE,
    )

    @field_validator("jobs")
    @classmethod
    def _check_jobs(cls, url: str) -> str:
        if _JOB_STORE.match(url) is None:
            raise ValueError(_WANTED_JOB_STORE)
        return url

    @field_validator("jobs_file")
    @classmethod
    def _check_jobs_file(cls, path: str | None) -> str | None:
        return absolute(path)

    def job_store(self) -> str:
        """Return the URL of the job store; ConfigError if its file cannot be read or has none."""
        if self.jobs_file is None:
            return self.jobs
        try:
            url = Path(self.jobs_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"storage.jobs_file cannot be read: {error}") from None
        if _JOB_STORE.match(url) is None:
            raise ConfigError(f"what storage.jobs_file {self.jobs_file} holds {_WANTED_JOB_STORE}")
        return url

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        for one, other in combinations(BLOB_FOLDERS, 2):
            if getattr(self, one).rstrip("/") == getattr(self, other).rstrip("/"):
                raise ValueError(f"{one} and {other} must be different places")
        return self

    def resolved(self, folder: Path) -> Self:
        """Return it with absolute paths: its readers run in other working folders."""
        jobs = self.jobs
        kind, mark, path = jobs.partition(":///")
        is_file = kind == "sqlite" and mark and path and path != ":memory:"
        if is_file and self.jobs_file is None:
            jobs = f"sqlite:///{folder / path}"
        urls = {name: getattr(self, name) for name in BLOB_FOLDERS}
        folders = {
            name: url if "://" in url else str(folder / Path(url).expanduser())
            for name, url in urls.items()
        }
        return changed(self, jobs=jobs, **folders)

    def check_nodes(self, num_nodes: int, *, has_jobs: bool = True) -> None:
        """Refuse files of one node as the storage of a cell on several.

        A dispatcher that restarts on another node would find no jobs, and nobody the images that
        were made there.

        Args:
            has_jobs: whether the caller opens the job store, too.

        Raises:
            ConfigError: names the keys, and what to set.
        """
        places = {key: getattr(self, key) for key in BLOB_FOLDERS}
        if has_jobs:
            places = {"jobs": self.job_store()} | places
        local = [f"storage.{key} ({value})" for key, value in places.items() if _is_local(value)]
        if num_nodes <= 1 or self.is_shared or not local:
            return
        raise ConfigError(
            f"the Ray cluster has {num_nodes} nodes, but {' and '.join(local)} would be on the "
            "disk of one of them. Set storage.jobs to 'postgresql://user:password@host/database', "
            "and storage.results, storage.states and storage.inputs to an object store "
            "('s3://bucket/folder'); or, if these paths are on a disk that all nodes share and "
            "that outlives each of them, set storage.is_shared: true"
        )


def _is_local(place: str) -> bool:
    scheme, mark, _ = place.partition("://")
    return not mark or scheme in {"sqlite", "file", "local"}


class LogsConfig(Section):
    """Log files of gateways, dispatcher and replicas; see docs/logs.md."""

    format: Literal["text", "json"] = Field("text", description="readable lines, or JSON objects")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level that is written"
    )
