"""What dispatcher, gateways and replicas share: log files, metrics in Ray, the check of storage."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextvars import Context
from logging.handlers import MemoryHandler

import ray
from ray import serve
from ray.serve.schema import LoggingConfig
from ray.util.metrics import Counter, Gauge

from ray_cluster.compat import put_first
from ray_cluster.config.sections.cell_wide import LogsConfig, StorageConfig
from ray_cluster.errors import ConfigError
from ray_cluster.observability.logs import set_up_logs
from ray_cluster.observability.metrics_changes import Change, Changes
from ray_cluster.observability.metrics_snapshot import Snapshot

logger = logging.getLogger(__name__)

# of log lines, while a request waits for nothing but its image
_DELAY_S = 0.05
# Ray itself passes metrics on every ten seconds, and forgets a gauge after twenty
_METRICS_EVERY_S = 2.0
# Ray puts it in front of every name
_RAY = "ray_"
_NODES_EVERY_S = 10.0


def serve_logging(config: LogsConfig) -> LoggingConfig:
    """Return the form of Serve's own lines that matches ours in the same file."""
    return LoggingConfig(
        encoding=config.format.upper(),
        log_level=config.level.upper(),
        # a line per call of the dispatcher costs more than the call
        enable_access_log=False,
    )


def set_up_actor_logs(config: LogsConfig) -> None:
    """Write this replica's lines to the file that Serve opened for it, else to standard error."""
    context = serve.get_replica_context()
    # the file alone, without the filters in front of it that put Ray's values into records
    files: list[logging.Handler] = [
        handler.target
        for handler in logging.getLogger("ray.serve").handlers
        if isinstance(handler, MemoryHandler) and handler.target is not None
    ]
    set_up_logs(
        config,
        files or [logging.StreamHandler()],
        process={
            "application": context.app_name,
            "deployment": context.deployment,
            "process_id": context.replica_id.unique_id,
        },
        delay_s=_DELAY_S,
    )


def refuse_local_storage(config: StorageConfig, *, has_jobs: bool = True) -> None:
    """Raise :class:`ConfigError` where this process might not find the files of the others."""
    config.check_nodes(_num_nodes(), has_jobs=has_jobs)


def _num_nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


class NodeWatch:
    """Warns when nodes join a cell whose storage is on one node's disk.

    What runs goes on: it is on the node that has the files. What is started from then on is
    refused.
    """

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._warning = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        # in a context of its own: Serve cancels what a cancelled request has called
        self._task = asyncio.create_task(self._watch_forever(), context=Context())

    def warnings(self) -> list[str]:
        """Return what is wrong now."""
        return [self._warning] if self._warning else []

    async def _watch_forever(self) -> None:
        while True:
            num_nodes = await asyncio.to_thread(_num_nodes)
            before, self._warning = self._warning, ""
            try:
                self._config.check_nodes(num_nodes)
            except ConfigError as error:
                self._warning = f"{error}. What starts anew is refused until then"
            if self._warning and self._warning != before:
                logger.error(self._warning)
            await asyncio.sleep(_NODES_EVERY_S)


class RayMetrics:
    """Mirrors this process's metrics into ``ray.util.metrics``, for Ray's Prometheus endpoint.

    Each process passes on what it counted itself, not the dispatcher's sums: Ray keeps the counts
    of a process that has ended, so that each number is in Ray exactly once.

    Args:
        snapshot: returns the process's own metrics.
    """

    def __init__(self, snapshot: Callable[[], Awaitable[Snapshot]]) -> None:
        self._snapshot = snapshot
        self._changes = Changes()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        # in a context of its own: Serve cancels what a cancelled request has called
        self._task = asyncio.create_task(self._mirror_forever(), context=Context())
        self._task.add_done_callback(_log_end)

    async def _mirror_forever(self) -> None:
        while True:
            for change in self._changes.since_last(await self._snapshot()):
                self._pass_on(change)
            await asyncio.sleep(_METRICS_EVERY_S)

    def _pass_on(self, change: Change) -> None:
        name = change.name.removeprefix(_RAY)
        tag_keys = tuple(key for key, _ in change.labels)
        tags = dict(change.labels)
        if change.kind == "counter":
            if name not in self._counters:
                self._counters[name] = Counter(name, change.help_text, tag_keys)
            self._counters[name].inc(change.value, tags)
            return
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, change.help_text, tag_keys)
        self._gauges[name].set(change.value, tags)


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("metrics are not passed on to Ray any more", exc_info=error)


def cell_id() -> str:
    """Return what this service has in common with none but its own actors, also later ones."""
    name = f"ray-cluster cell {serve.get_replica_context().app_name}"
    return put_first(name, secrets.token_hex(16))
