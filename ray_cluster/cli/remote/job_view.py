"""A job in words, in tables, and as it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_cluster.api.output.resource_schemas import JobResponse
from ray_cluster.cli.images.image_files import effort_words
from ray_cluster.protocol.jobs import JobState

_STYLE_BY_STATE: dict[JobState, str] = {
    "queued": "dim",
    "running": "cyan",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "yellow",
}
_DAY_S = 86400.0
# below, columns that are not needed most are left out
_WIDE_COLUMNS = 110
_BAR_COLUMNS = 16
_LINES_PER_JOB = 10


def _clock(unix_s: float | None) -> str:
    """Return an instant in local time, with the date unless it is near."""
    if unix_s is None:
        return "-"
    is_near = abs(unix_s - time.time()) < _DAY_S / 2
    return time.strftime("%H:%M:%S" if is_near else "%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def one_line(text: str) -> str:
    """Return a text of a user on one line, without what would steer a terminal."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _queue(job: JobResponse) -> str:
    """Return how many images wait before a job's next one."""
    if job.queue_position is None:
        return "-"
    return f"{job.queue_position} before it" if job.queue_position else "next"


def _failure(job: JobResponse) -> str:
    return "no reason given" if job.error is None else one_line(job.error.message)


def job_words(job: JobResponse) -> str:
    """Return how far a job is, as half a sentence."""
    # an image that was leased more than once
    attempts = f", {job.attempts} attempts" if job.attempts > job.n else ""
    if job.state == "failed":
        return f"failed: {_failure(job)}"
    if job.state == "cancelled":
        return "cancelled"
    if job.state == "completed":
        return f"completed: {len(job.data)} image(s){attempts}"
    words = [job.state, f"step {job.step} of {job.num_steps}"]
    if job.queue_position is not None:
        words.append(f"in the queue: {_queue(job)}")
    if job.predicted_finish is not None:
        words.append(f"done at {_clock(job.predicted_finish)}")
    return ", ".join(words) + attempts


def job_details(job: JobResponse) -> dict[str, str]:
    """Return all that is known of a job, by name."""
    met = {None: "still possible", True: "met", False: "not met"}[job.deadline.met]
    details = {
        "job": job.id,
        "state": job.state,
        "created": _clock(job.created),
        "finished": _clock(job.finished),
        "model": one_line(job.model),
        "prompt": one_line(job.prompt),
        "images": f"{job.n} of {job.size}",
        "steps": f"{job.step} of {job.num_steps}",
        "queue": _queue(job),
        "done at": _clock(job.predicted_finish),
        "attempts": str(job.attempts),
        "deadline": f"{job.deadline.slo_s:g} s after its creation: {met}",
    }
    if job.loras:
        details["loras"] = ", ".join(f"{one.name}:{one.scale:g}" for one in job.loras)
    if job.controlnets:
        details["controlnets"] = ", ".join(
            f"{one.name}+{one.preprocess}:{one.scale:g}:{one.start:g}-{one.end:g}"
            for one in job.controlnets
        )
    if effort := effort_words(job.fidelity):
        details["fidelity"] = effort
    if job.error is not None:
        details["error"] = _failure(job)
    for number, image in enumerate(job.data, 1):
        details[f"image {number}"] = f"{image.url}  seed {image.seed}  {image.num_bytes} bytes"
    return details


def jobs_table(jobs: Sequence[JobResponse], console: Console) -> Table:
    """Return a line per job, as wide as the console; a heading on a terminal only."""
    is_wide = console.width >= _WIDE_COLUMNS
    middle = ("model", "images") if is_wide else ()
    table = _table("job", "state", "created", *middle, "steps", "prompt")
    table.show_header = console.is_terminal
    # the prompt alone is cut
    for column in table.columns[:-1]:
        column.no_wrap = True
    for job in jobs:
        more = (Text(one_line(job.model)), str(job.n)) if is_wide else ()
        created = time.localtime(job.created)
        is_near = is_wide or time.time() - job.created < _DAY_S / 2
        table.add_row(
            job.id,
            Text(job.state, _STYLE_BY_STATE[job.state]),
            _clock(job.created) if is_near else time.strftime("%Y-%m-%d", created),
            *more,
            f"{job.step}/{job.num_steps}",
            Text(one_line(job.prompt), no_wrap=True, overflow="ellipsis"),
        )
    return table


def _progress_table(jobs: Sequence[JobResponse], width: int) -> Table:
    is_wide = width >= _WIDE_COLUMNS
    table = _table("job", "state", *(("",) if is_wide else ()), "steps", "queue", "done at")
    for job in jobs:
        bar = ProgressBar(total=job.num_steps, completed=job.step, width=_BAR_COLUMNS)
        attempts = f", {job.attempts} attempts" if job.attempts > job.n else ""
        table.add_row(
            job.id,
            Text(job.state, _STYLE_BY_STATE[job.state]),
            *((bar,) if is_wide else ()),
            f"{job.step}/{job.num_steps}",
            Text(_queue(job)),
            _clock(job.predicted_finish if job.finished is None else job.finished) + attempts,
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


class JobScreen:
    """Shows jobs as they go on: a live table on a terminal, else a line per change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown: dict[str, tuple[object, ...]] = {}

    def show(self, jobs: Sequence[JobResponse]) -> None:
        """Show the present state of all jobs."""
        if self._live is not None:
            self._live.update(_progress_table(jobs, self._console.width), refresh=True)
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

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
