"""Shows jobs as they go on: a live table on a terminal, else a line per change."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_cluster.api.replies import JobResponse
from ray_cluster.cli.job_text import clock_text, job_words, place_text, state_text

_BAR_COLUMNS = 16
_LINES_PER_JOB = 10


class JobScreen:
    """Jobs, each with how far it is.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown: dict[str, tuple[object, ...]] = {}

    def show(self, jobs: Sequence[JobResponse]) -> None:
        """Show the present state of all jobs."""
        if self._live is not None:
            self._live.update(_table(jobs), refresh=True)
            return
        for job in jobs:
            state = (job.state, job.queue_position, job.step * _LINES_PER_JOB // job.num_steps)
            if self._shown.get(job.id) != state:
                self._shown[job.id] = state
                self._console.print(f"{job.id}  {job_words(job)}", markup=False)

    def __enter__(self) -> JobScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _table(jobs: Sequence[JobResponse]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("job", "state", "steps", "", "queue", "done at", "attempts"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        bar = ProgressBar(total=job.num_steps, completed=job.step, width=_BAR_COLUMNS)
        done_s = job.predicted_finish if job.finished is None else job.finished
        table.add_row(
            job.id,
            state_text(job),
            bar,
            f"{job.step}/{job.num_steps}",
            Text(place_text(job)),
            clock_text(done_s),
            str(job.attempts),
        )
    return table
