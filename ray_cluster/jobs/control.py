"""The dispatcher as its controller sees it: what there is to observe, and the plan in force.

What a controller says is saved through the job store, so that a later dispatcher keeps to the plan
and a later controller goes on from the memory of this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.observing import InForce
from ray_cluster.dispatch.planned import within
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.jobs.sql_engine import JobStoreError
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.jobs.store_threads import StoreThreads
from ray_cluster.observability.logs import log_event
from ray_cluster.policies.plan import PlannedSettings
from ray_cluster.protocol.control import Observation, RoundRecord
from ray_cluster.protocol.leases import Registration

logger = logging.getLogger(__name__)

T = TypeVar("T")

# rounds that changed something, which operators may look at
MAX_HISTORY = 100
_PLAN: TextCodec[PlannedSettings | None] = TextCodec(PlannedSettings | None)
_HISTORY: TextCodec[tuple[RoundRecord, ...]] = TextCodec(tuple[RoundRecord, ...])


class ControlService:
    """Answers the controller, and keeps its plan in force.

    Implements :class:`~ray_cluster.protocol.control.ControlCalls`.

    Args:
        wall_clock: Unix time in seconds.

    Attributes:
        is_enabled: whether the cell has a controller; without one no plan is in force.
    """

    def __init__(
        self,
        dispatch: DispatchService,
        store: SqlJobStore,
        threads: StoreThreads,
        wall_clock: Callable[[], float],
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._threads = threads
        self._wall_clock = wall_clock
        self.is_enabled = True
        self._started_s = wall_clock()
        self._settings: Settings | None = None
        self._plan: PlannedSettings | None = None
        self._memory = ""
        self._latest: RoundRecord | None = None
        self._history: tuple[RoundRecord, ...] = ()
        # the last registration of each pool's workers
        self._known: dict[str, Registration] = {}

    async def start(self, workers: Iterable[Registration]) -> None:
        """Read what an earlier dispatcher has saved, and keep to its plan.

        Args:
            workers: as they registered with it.
        """
        for one in workers:
            self._known.setdefault(one.pool, one)
        saved = await self._threads.call("read", self._store.control)
        self._plan = _read(_PLAN, saved, "plan", None)
        self._history = _read(_HISTORY, saved, "history", self._history)
        self._memory = saved.get("memory", "")
        if self._plan is not None and self._settings is not None:
            self._dispatch.apply(self.planned(self._settings))

    def planned(self, settings: Settings) -> Settings:
        """Plan within other settings from now on; return them as the plan in force has them."""
        self._settings = settings
        return within(settings, self._plan if self.is_enabled else None)

    def note_worker(self, registration: Registration) -> None:
        """Know a worker that has registered."""
        self._known[registration.pool] = registration

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Return the state of the cell; see :class:`ControlCalls`."""
        in_force = InForce(self._known_settings(), self._started_s, self._plan)
        return self._dispatch.observe(in_force, self._known, cursors, self._wall_clock())

    def _known_settings(self) -> Settings:
        if self._settings is None:
            raise DispatcherUnavailable("the dispatcher has no settings yet; it is starting")
        return self._settings

    async def apply_plan(self, plan: PlannedSettings) -> None:
        """Apply a plan that is later than the one in force; see :class:`ControlCalls`."""
        settings = self._known_settings()
        if self._plan is not None and plan.version <= self._plan.version:
            return
        self._plan = plan
        self._dispatch.apply(self.planned(settings))
        log_event(logger, "plan_applied", version=str(plan.version))
        await self._save("plan", _PLAN.encode(plan))

    async def note_round(self, record: RoundRecord, memory: str | None) -> None:
        """Keep what a round did; see :class:`ControlCalls`."""
        self._latest = record
        if record.actions or record.failures or record.overdue:
            self._history = (*self._history, record)[-MAX_HISTORY:]
            await self._save("history", _HISTORY.encode(self._history))
        if memory is not None:
            self._memory = memory
            await self._save("memory", memory)

    async def memory(self) -> str:
        """Return what a controller has saved last; empty without one."""
        return self._memory

    async def _save(self, name: str, document: str) -> None:
        """Write for later dispatchers; a failure is only logged, as this one has it in memory."""
        try:
            write = partial(self._store.save_control, name, document)
            await self._threads.call("write", write)
        except JobStoreError as error:
            logger.warning("the controller's %s is not saved: %s", name, error)


def _read(codec: TextCodec[T], saved: Mapping[str, str], name: str, default: T) -> T:
    """Return what was saved; the default if nothing was, or by another version."""
    if name not in saved:
        return default
    try:
        return codec.decode(saved[name])
    except CodecError as error:
        logger.warning("the saved %s of the controller is not used: %s", name, error)
        return default
