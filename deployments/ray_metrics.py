"""Passes this process's metrics on to Ray, whose own Prometheus endpoint then has them too.

Each process passes on what it counted itself, not the sums over all that the dispatcher keeps: Ray
keeps the counts of a process that has ended, so that each number is in Ray exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from ray.util.metrics import Counter, Gauge

from ray_cluster.observability.metrics_changes import Change, Changes
from ray_cluster.observability.metrics_snapshot import Snapshot

logger = logging.getLogger(__name__)

# Ray itself passes metrics on every ten seconds, and forgets a gauge after twenty
_EVERY_S = 2.0
# Ray puts it in front of every name
_RAY = "ray_"


class RayMetrics:
    """Mirrors snapshots into ``ray.util.metrics`` until the process ends.

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
        self._task.add_done_callback(_tell_end)

    async def _mirror_forever(self) -> None:
        while True:
            for change in self._changes.since_last(await self._snapshot()):
                self._pass_on(change)
            await asyncio.sleep(_EVERY_S)

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


def _tell_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("metrics are not passed on to Ray any more", exc_info=error)
