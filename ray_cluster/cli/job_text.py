"""What is said of a job, in words and in tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from ray_cluster.api.replies import JobResponse
from ray_cluster.cli.made import effort_words
from ray_cluster.protocol.jobs import JobState

_STYLE_BY_STATE: dict[JobState, str] = {
    "queued": "dim",
    "running": "cyan",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "yellow",
}
_DAY_S = 86400.0


def clock_text(unix_s: float | None) -> str:
    """Return an instant as this machine's clocks show it, with the date unless it is near."""
    if unix_s is None:
        return "-"
    is_near = abs(unix_s - time.time()) < _DAY_S / 2
    return time.strftime("%H:%M:%S" if is_near else "%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def one_line(text: str) -> str:
    """Return a text of a user on one line, without what would steer a terminal."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def place_text(job: JobResponse) -> str:
    """Return how many images wait before a job's next one."""
    match job.queue_position:
        case None:
            return "-"
        case 0:
            return "next"
        case position:
            return f"{position} before it"


def state_text(job: JobResponse) -> Text:
    """Return the state in its colour."""
    return Text(job.state, _STYLE_BY_STATE[job.state])


def job_words(job: JobResponse) -> str:
    """Return how far a job is, as half a sentence."""
    steps = f"step {job.step} of {job.num_steps}"
    if job.state == "failed":
        return f"failed: {failure_text(job)}"
    if job.state == "cancelled":
        return "cancelled"
    if job.state == "completed":
        return f"completed: {len(job.data)} image(s){_retries(job)}"
    words = [job.state, steps]
    if job.queue_position is not None:
        words.append(f"in the queue: {place_text(job)}")
    if job.predicted_finish is not None:
        words.append(f"done at {clock_text(job.predicted_finish)}")
    return ", ".join(words) + _retries(job)


def _retries(job: JobResponse) -> str:
    """Tell of images that were given to a replica more than once."""
    return f", {job.attempts} attempts" if job.attempts > job.n else ""


def failure_text(job: JobResponse) -> str:
    """Return why a job failed."""
    return "no reason given" if job.error is None else one_line(job.error.message)


def jobs_table(jobs: Sequence[JobResponse]) -> Table:
    """Return a line per job."""
    table = Table(box=box.SIMPLE)
    for name in ("job", "state", "created", "model", "images", "steps", "prompt"):
        table.add_column(name)
    for job in jobs:
        table.add_row(
            job.id,
            state_text(job),
            clock_text(job.created),
            Text(job.model),
            str(job.n),
            f"{job.step}/{job.num_steps}",
            Text(one_line(job.prompt)),
        )
    return table


def job_details(job: JobResponse) -> dict[str, str]:
    """Return all that is known of a job, by name."""
    met = {None: "still possible", True: "met", False: "not met"}[job.deadline.met]
    details = {
        "job": job.id,
        "state": job.state,
        "created": clock_text(job.created),
        "finished": clock_text(job.finished),
        "model": one_line(job.model),
        "prompt": one_line(job.prompt),
        "images": f"{job.n} of {job.size}",
        "steps": f"{job.step} of {job.num_steps}",
        "queue": place_text(job),
        "done at": clock_text(job.predicted_finish),
        "attempts": str(job.attempts),
        "deadline": f"{job.deadline.slo_s:g} s after its creation: {met}",
    }
    if effort := effort_words(job.fidelity):
        details["fidelity"] = effort
    if job.error is not None:
        details["error"] = failure_text(job)
    for number, image in enumerate(job.data, 1):
        details[f"image {number}"] = f"{image.url}  seed {image.seed}  {image.num_bytes} bytes"
    return details
