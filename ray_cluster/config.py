"""The configuration: one YAML file, validated, with every default in one place.

All reads of the environment happen here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from ray_cluster.config_problems import describe
from ray_cluster.errors import ConfigError
from ray_cluster.requests import SamplerName

API_KEYS_VARIABLE = "RAY_CLUSTER_API_KEYS"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpConfig(_Section):
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


class RayConfig(_Section):
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


class LimitsConfig(_Section):
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


class DispatchConfig(_Section):
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


class StorageConfig(_Section):
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


class LogsConfig(_Section):
    """What gateways, dispatcher and replicas write to their log files; docs/logs.md tells it."""

    format: Literal["text", "json"] = Field(
        "text", description="lines for a person to read, or one JSON object per line"
    )
    level: Literal["debug", "info", "warning", "error"] = "info"


class DefaultsConfig(_Section):
    """What a request gets that does not say; None takes the model's own default."""

    size: str | None = Field(None, pattern=r"^\d+x\d+$")
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0)
    sampler: SamplerName | None = None


class PoolConfig(_Section):
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
    min_px: int | None = Field(None, ge=8)
    max_px: int | None = Field(None, ge=8)
    max_num_inference_steps: int = Field(100, ge=1)
    memory_gib: float | None = Field(None, gt=0, description="budget; None takes what is free")
    offload: Literal["auto", "never"] = "auto"
    defaults: DefaultsConfig = DefaultsConfig()

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


class ClusterConfig(_Section):
    """The whole configuration of one cell."""

    http: HttpConfig = HttpConfig()
    ray: RayConfig = RayConfig()
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    storage: StorageConfig = StorageConfig()
    logs: LogsConfig = LogsConfig()
    pools: tuple[PoolConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, given {names}")
        return self

    def pool(self, name: str) -> PoolConfig:
        """Return the pool of that name; raises :class:`ConfigError` if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(f"no pool {name!r}; there are {[pool.name for pool in self.pools]}")


def default_config_path() -> Path:
    """Return the path of ``configs/local.yaml``, which ships with the package."""
    return Path(str(resources.files("ray_cluster") / "configs" / "local.yaml"))


def load_config(
    source: ClusterConfig | Mapping[str, Any] | str | Path | None = None,
) -> ClusterConfig:
    """Return the validated configuration from an object, a mapping, a YAML path or the default.

    API keys from the environment variable ``RAY_CLUSTER_API_KEYS`` (comma-separated) are added.

    Raises:
        ConfigError: the file is missing or a key is wrong; the message names each one.
    """
    if isinstance(source, ClusterConfig):
        return source
    where = "configuration"
    if source is None or isinstance(source, str | Path):
        path = Path(source) if source is not None else default_config_path()
        where = str(path)
        source = _read_yaml(path)
    try:
        config = ClusterConfig.model_validate(_with_environment(dict(source)))
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error, ClusterConfig)}") from error
    return config.model_copy(update={"storage": config.storage.resolved(Path.cwd())})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping with 'pools', not {type(content).__name__}")
    return content


def _with_environment(content: dict[str, Any]) -> dict[str, Any]:
    keys = [key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip()]
    http = content.get("http") or {}
    if keys and isinstance(http, dict):
        content["http"] = {**http, "api_keys": [*http.get("api_keys", ()), *keys]}
    return content


def set_environment(settings: Mapping[str, str]) -> None:
    """Set variables of this process for the processes that it starts; what is set is left alone."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
