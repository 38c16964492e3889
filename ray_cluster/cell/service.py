"""What is to be known of a cell as a whole: its settings, its metrics, what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ray_cluster.dispatch.reports.cell_views import POINT_EVERY_S, History
from ray_cluster.dispatch.reports.metrics import cell_snapshot
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.settings_in_force import SettingsBook
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.service import JobService
from ray_cluster.observability.metrics_snapshot import MetricsBook, Snapshot, merge
from ray_cluster.process.tasks import Tasks
from ray_cluster.process.turns import Shared
from ray_cluster.protocol.cell_view import CellView
from ray_cluster.protocol.settings import GatewaySettings


class CellService:
    """Answers for the cell.

    Implements :class:`~ray_cluster.protocol.dispatcher.CellCalls`.

    Args:
        book: of the metrics of all other processes.
        settings: those in force.
        clock: the one that the books are kept by.
        wall_clock: Unix time in seconds.
        notices: returns what else :meth:`warnings` should tell now.
        undeployed: returns models in the settings that nobody has deployed.
    """

    def __init__(
        self,
        dispatch: DispatchService,
        jobs: JobService,
        book: MetricsBook,
        settings: SettingsBook,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        notices: Callable[[], Sequence[str]] = tuple,
        undeployed: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._dispatch = dispatch
        self._jobs = jobs
        self._book = book
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._history = History()
        self._tasks = Tasks()
        self._notices = notices
        self._undeployed = undeployed
        self._metrics = Shared(self._add_up)
        self._warnings = Shared(self._look_for_warnings)

    def start(self) -> None:
        """Begin to note how busy the cell is."""
        self._tasks.spawn(self._note(), "history")

    async def close(self) -> None:
        """End that."""
        await self._tasks.close()

    async def _note(self) -> None:
        while True:
            await asyncio.sleep(POINT_EVERY_S)
            self._history.note(await self._dispatch.snapshot(), self._wall_clock())

    async def view(self, after_s: float) -> CellView:
        """Return the cell as it is, and its history after an instant of Unix time."""
        warnings, history = await self.warnings(), self._history.after(after_s)
        return self._dispatch.view(warnings, history, self._wall_clock())

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        """Return the metrics of the whole cell, the caller's present ones included."""
        await self.report_metrics(process_id, own)
        return await self._metrics.get()

    async def _add_up(self) -> Snapshot:
        cluster, control = await self._dispatch.snapshot(), self._jobs.control.metrics()
        parts, jobs = self._book.parts(self._clock()), self._jobs.counts
        return await asyncio.to_thread(
            lambda: merge([*parts, cell_snapshot(cluster, jobs), control])
        )

    async def report_metrics(self, process_id: str, own: Snapshot) -> None:
        """Take in the present metrics of another process."""
        self._book.update(process_id, own, self._clock())

    async def own_metrics(self) -> Snapshot:
        """Return the dispatcher's own metrics."""
        own = cell_snapshot(await self._dispatch.snapshot(), self._jobs.counts)
        return (*own, *self._jobs.control.metrics())

    async def starting(self) -> tuple[str, ...]:
        """Return the models that are known from before and of which no replica has come yet.

        Raises:
            JobStoreUnavailable: another cell has taken over, or another dispatcher the job store.
        """
        if self._jobs.ownership.is_lost:
            raise JobStoreUnavailable("another dispatcher has taken the job store: call again")
        # not before: somebody must be ready meanwhile
        if self._jobs.ownership.is_succeeded:
            self._jobs.check_not_handed_over()
        return self._dispatch.starting

    async def warnings(self) -> tuple[str, ...]:
        """Return what is wrong though calls are answered."""
        return await self._warnings.get()

    async def _look_for_warnings(self) -> tuple[str, ...]:
        cluster = await self._dispatch.snapshot()
        return (*cluster.warnings, *self._jobs.warnings, *self._notices())

    async def undeployed(self) -> tuple[str, ...]:
        """Return models in the settings that nobody has deployed."""
        return self._undeployed()

    async def settings(self, process_id: str, seen: str, wait_s: float) -> GatewaySettings | None:
        """See :meth:`SettingsBook.wait`."""
        return await self._settings.wait(process_id, seen, wait_s)
