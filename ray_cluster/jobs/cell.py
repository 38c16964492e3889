"""What is to be known of a cell as a whole: its metrics, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable

from ray_cluster.dispatch.metrics import cell_snapshot
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.jobs.service import JobService
from ray_cluster.observability.metrics_book import MetricsBook
from ray_cluster.observability.metrics_snapshot import Snapshot


class CellService:
    """Answers for the cell.

    Implements :class:`~ray_cluster.protocol.dispatcher.CellCalls`.

    Args:
        book: of the metrics of all other processes.
        clock: the one that the book is kept by.
    """

    def __init__(
        self,
        dispatch: DispatchService,
        jobs: JobService,
        book: MetricsBook,
        clock: Callable[[], float],
    ) -> None:
        self._dispatch = dispatch
        self._jobs = jobs
        self._book = book
        self._clock = clock

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        """Return the metrics of the whole cell, the caller's present ones included."""
        await self.tell_metrics(process_id, own)
        return self._book.merged(self._clock(), await self.own_metrics())

    async def tell_metrics(self, process_id: str, own: Snapshot) -> None:
        """Take in the present metrics of another process."""
        self._book.update(process_id, own, self._clock())

    async def own_metrics(self) -> Snapshot:
        """Return the dispatcher's own metrics."""
        return cell_snapshot(await self._dispatch.snapshot(), self._jobs.num_open)

    async def starting(self) -> tuple[str, ...]:
        """Return the models that are known from before and of which no replica has come yet."""
        return self._dispatch.starting

    async def warnings(self) -> tuple[str, ...]:
        """Return what is wrong though calls are answered."""
        return (*(await self._dispatch.snapshot()).warnings, *self._jobs.warnings)
