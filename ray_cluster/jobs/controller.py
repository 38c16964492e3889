"""The dispatcher as its controller sees it: what there is to observe, and the plan in force.

What a controller says is saved through the job store, so that a later dispatcher keeps to the plan
and a later controller goes on from the memory of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.planned import within
from ray_cluster.dispatch.reports.observing import InForce
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.jobs.controller_metrics import plan_snapshot
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads
from ray_cluster.observability.logs import log_event
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.planning.plan import PlannedSettings
from ray_cluster.protocol.controller import Observation, PlanReport, RoundMode, RoundRecord
from ray_cluster.protocol.leases import Registration

logger = logging.getLogger(__name__)

T = TypeVar("T")

# silence after which a controller is not counted on, and periods of it
_SILENT_S, _SILENT_PERIODS = 20.0, 4
_MAX_HELD_S = 30.0
# rounds that changed something, which operators may look at
MAX_HISTORY = 100
_PLAN: TextCodec[PlannedSettings | None] = TextCodec(PlannedSettings | None)
# a round of the history, with its number: each is written once, in place of one that is too old
_ROUND: TextCodec[tuple[int, RoundRecord] | None] = TextCodec(tuple[int, RoundRecord] | None)


class ControlService:
    """Answers the controller, and keeps its plan in force.

    Implements :class:`~ray_cluster.protocol.controller.ControlCalls` and
    :class:`~ray_cluster.protocol.controller.PlanCalls`.

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
        self._is_paused = False
        # rounds of the history that were ever written
        self._num_written = 0
        self._report = PlanReport(is_enabled=True)
        # the last registration of each pool's workers
        self._known: dict[str, Registration] = {}
        self._num_events = 0
        self._event = asyncio.Event()
        self._silence: asyncio.TimerHandle | None = None
        self._is_heard = False
        dispatch.on_wanted = self._note_event

    async def start(self, workers: Iterable[Registration]) -> None:
        """Read what an earlier dispatcher has saved, and keep to its plan.

        Args:
            workers: as they registered with it.
        """
        for one in workers:
            self._known.setdefault(one.pool, one)
        saved = await self._threads.call("read", self._store.control)
        self._plan = _read(_PLAN, saved, "plan", None)
        rounds = [_read(_ROUND, saved, _slot(one), None) for one in range(MAX_HISTORY)]
        written = sorted((one for one in rounds if one), key=lambda one: one[0])
        self._num_written = written[-1][0] + 1 if written else 0
        history = tuple(record for _, record in written)
        self._is_paused = saved.get("mode") == "paused"
        self._report = replace(self._report, history=history)
        self._memory = saved.get("memory", "")
        self._latest = history[-1] if history else None
        self._note_asleep(is_woken=False)
        if self._plan is not None and self._settings is not None:
            self._dispatch.apply(self.planned(self._settings))

    def planned(self, settings: Settings) -> Settings:
        """Plan within other settings from now on; return them as the plan in force has them."""
        self._settings = settings
        return within(settings, self._plan if self.is_enabled else None)

    def leave(self) -> None:
        """Have nothing observed and planned any more: another cell has taken this one's place."""
        self._settings = None

    def note_worker(self, registration: Registration) -> None:
        """Know a worker that has registered."""
        self._known[registration.pool] = registration

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Return the state of the cell; see :class:`ControlCalls`."""
        in_force = InForce(self._known_settings(), self._started_s, self._plan, self._is_paused)
        seen = self._dispatch.observe(in_force, self._known, cursors, self._wall_clock())
        return replace(seen, last_version=0 if self._latest is None else self._latest.version)

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
        is_new = _is_news(record, self._latest)
        self._latest = record
        self._note_heard()
        last = self._report
        history = (*last.history, record)[-MAX_HISTORY:] if is_new else last.history
        self._report = replace(
            last,
            heard_s=self._wall_clock(),
            latest=record,
            history=history,
            num_rounds=last.num_rounds + 1,
            num_actions=last.num_actions + _num_done(record),
            num_failures=last.num_failures + len(record.failures),
            num_rollbacks=last.num_rollbacks + len(record.rollbacks),
            round_s=last.round_s + record.took_s,
        )
        if is_new:
            number, self._num_written = self._num_written, self._num_written + 1
            await self._save(_slot(number), _ROUND.encode((number, record)))
        if memory is not None:
            self._memory = memory
            await self._save("memory", memory)

    async def plan_report(self) -> PlanReport:
        """Return the plan, and what was planned before."""
        return self._present_report()

    def _present_report(self) -> PlanReport:
        return replace(
            self._report,
            is_enabled=self.is_enabled,
            mode=self._mode,
            silent_s=self._silent_s,
            seats=self._dispatch.seats(),
            cascades=self._dispatch.cascades_in_force(),
        )

    @property
    def _mode(self) -> RoundMode:
        if self._is_paused:
            return "paused"
        is_dry = self._settings is not None and self._settings.control.dry_run
        return "dry_run" if is_dry else "applied"

    @property
    def _silent_s(self) -> float:
        """Seconds after which a controller that was not heard of is not counted on."""
        period_s = 0.0 if self._settings is None else self._settings.control.period_s
        return max(_SILENT_S, _SILENT_PERIODS * period_s)

    def metrics(self) -> Snapshot:
        """Return the metrics of the rounds."""
        return plan_snapshot(self._present_report(), self._wall_clock())

    async def pause_plan(self, is_paused: bool) -> PlanReport:
        """Have plans made and not applied, or applied again."""
        self._is_paused = is_paused
        log_event(logger, "plan_paused" if is_paused else "plan_resumed")
        await self._save("mode", "paused" if is_paused else "applied")
        self._note_asleep(is_woken=self._is_heard)
        self._note_event()
        return await self.plan_report()

    async def wake(self, seen: int, wait_s: float) -> int:
        """Return the number of events once it is not ``seen``; see :class:`ControlCalls`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, _MAX_HELD_S)):
                while seen == self._num_events:
                    await self._event.wait()
        return self._num_events

    def _note_event(self) -> None:
        self._num_events += 1
        self._event.set()
        self._event = asyncio.Event()

    def _note_heard(self) -> None:
        """Count on the controller until it has been silent for a while."""
        if self._silence is not None:
            self._silence.cancel()
        self._is_heard = True
        self._note_asleep(is_woken=True)
        self._silence = asyncio.get_running_loop().call_later(self._silent_s, self._lose)

    def _lose(self) -> None:
        self._is_heard = False
        self._note_asleep(is_woken=False)

    def _note_asleep(self, *, is_woken: bool) -> None:
        """Tell the dispatch service which models have no replica by the latest plan.

        Args:
            is_woken: whether a controller is there, which starts a replica unless it is paused.
        """
        latest = self._latest if self.is_enabled else None
        is_applied = latest is None or latest.mode == "applied"
        counts: dict[str, int] = {}
        for one in () if latest is None else latest.pools:
            worker = self._known.get(one.pool)
            if worker is not None and worker.kind == "denoise":
                number = one.num_planned if is_applied else one.num_before
                counts[worker.model] = counts.get(worker.model, 0) + number
        asleep = [model for model, number in counts.items() if number == 0]
        acts = is_applied and not self._is_paused
        self._dispatch.note_asleep(asleep, is_woken=is_woken and acts)

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


def _slot(number: int) -> str:
    """Return the name under which a round of the history is saved."""
    return f"round-{number % MAX_HISTORY}"


def _is_news(record: RoundRecord, before: RoundRecord | None) -> bool:
    """Whether a round did or met something that the one before has not said already."""
    if not (record.actions or record.failures or record.overdue):
        return False
    return before is None or _said(record) != _said(before)


def _said(record: RoundRecord) -> tuple[object, ...]:
    words = (record.actions, record.failures, len(record.overdue))
    return (record.version, record.mode, *words)


def _num_done(record: RoundRecord) -> int:
    if record.mode != "applied":
        return 0
    return max(0, len(record.actions) - len(record.failures))


def _read(codec: TextCodec[T], saved: Mapping[str, str], name: str, default: T) -> T:
    """Return what was saved; the default if nothing was, or by another version."""
    if name not in saved:
        return default
    try:
        return codec.decode(saved[name])
    except CodecError as error:
        logger.warning("the saved %s of the controller is not used: %s", name, error)
        return default
