"""Jobs of a running service: created, followed and fetched over lost connections."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from ray_cluster.api.output.image_schemas import CascadeCard
from ray_cluster.api.output.resource_schemas import JobImage, JobResponse
from ray_cluster.cli.images.image_files import (
    GeneratedFile,
    GeneratedImages,
    GenerateFailed,
    PreviewFiles,
    effort_words,
)
from ray_cluster.cli.output import jobs_command
from ray_cluster.cli.progress import step_progress
from ray_cluster.cli.remote.remote_service import (
    NoAnswer,
    RemoteService,
    ServiceFailed,
    ask_again,
    error_from,
)
from ray_cluster.cli.service.signals import StopSignals
from ray_cluster.errors import InvalidRequest, RayClusterError

AnswerT = TypeVar("AnswerT")

_POLL_S = 0.3
_CANCEL_S = 5.0
# a service that is started again is back before
_SILENCE_S = 120.0


def check_completed(job: JobResponse) -> None:
    """Raise the reason why a job that has ended has no images, in the API's words."""
    if job.error is not None:
        raise error_from(job.error)
    if job.state != "completed":
        raise GenerateFailed(f"{job.id} was cancelled: it has no images")


def images_of(job: JobResponse, load: Callable[[JobImage], bytes]) -> GeneratedImages:
    """Return the images of a completed job; ``load`` fetches one."""
    assert job.finished is not None
    images = tuple(
        GeneratedFile(
            load(image),
            image.seed,
            {} if image.timing is None else image.timing.model_dump(),
            effort_words(image.fidelity),
            _stage_words(image.cascade),
        )
        for image in job.data
    )
    took_s, warnings = job.finished - job.created, tuple(job.warnings)
    return GeneratedImages(job.model, job.size, images, took_s, job.deadline.met, warnings)


def _stage_words(card: CascadeCard | None) -> str:
    """Return which model of a cascade has answered, and why."""
    if card is None:
        return ""
    confidence = "" if card.confidence is None else f", confidence {card.confidence:.2f}"
    return f"{card.stage} ({card.model}): {card.reason}{confidence}"


def open_job_ids(service: RemoteService) -> list[str]:
    """Return the ids of all jobs that have not ended, the oldest first."""
    # in this order: one that begins to run meanwhile is in both, and not in neither
    jobs = {job.id: job for state in ("queued", "running") for job in service.jobs(state)}
    return [job.id for job in sorted(jobs.values(), key=lambda job: job.created)]


def follow(
    service: RemoteService, job_ids: Sequence[str], console: Console
) -> Iterator[list[JobResponse]]:
    """Yield the jobs as they are, again and again, and for the last time once all have ended.

    Args:
        console: where a lost connection is reported.

    Raises:
        InvalidRequest: there is no such job.
        NoAnswer: for two minutes.
    """
    jobs = {job_id: service.job(job_id) for job_id in job_ids}
    yield list(jobs.values())
    while any(job.finished is None for job in jobs.values()):
        time.sleep(_POLL_S)
        for job_id, job in jobs.items():
            if job.finished is None:
                until_s = time.monotonic() + _SILENCE_S
                call = partial(service.job, job_id)
                jobs[job_id] = ask_again(call, until_s=until_s, console=console)
        yield list(jobs.values())


def generate_there(
    service: RemoteService,
    body: Mapping[str, Any],
    timeout_s: float,
    previews: PreviewFiles,
    console: Console,
    poll_s: float = _POLL_S,
) -> GeneratedImages:
    """Make images as a durable job, with its steps on the console. Ctrl-C or SIGTERM cancels it.

    Args:
        poll_s: seconds between two looks at it.

    Raises:
        InvalidRequest: a parameter is wrong.
        RayClusterError: the service cannot be reached, is full, failed, or took too long.
    """
    with StopSignals() as signals, step_progress(console) as progress:
        call = _RemoteCall(service, body, timeout_s, previews, progress)
        call.poll_s = poll_s
        try:
            signals.arm()
            return call.run()
        except KeyboardInterrupt:
            call.cancel()
            raise


class _RemoteCall:
    """One call as a job, from its idempotency key to its images."""

    def __init__(
        self,
        service: RemoteService,
        body: Mapping[str, Any],
        timeout_s: float,
        previews: PreviewFiles,
        progress: Progress,
    ) -> None:
        self._service = service
        self._create = partial(service.create_job, body, f"generate-{secrets.token_hex(16)}")
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s
        self._previews = previews
        self._progress = progress
        self._task = progress.add_task(f"asking {service.base}", total=None)
        self._job_id: str | None = None
        self.poll_s = _POLL_S

    def run(self) -> GeneratedImages:
        job = self._accepted()
        self._job_id = job.id
        while job.finished is None:
            self._show(job)
            self._write_previews(job)
            if time.monotonic() > self._until_s:
                raise self._too_late("it is not done")
            time.sleep(self.poll_s)
            job = self._ask(partial(self._service.job, job.id))
        self._show(job)
        check_completed(job)
        return images_of(job, lambda image: self._ask(partial(self._service.file, image.url)))

    def cancel(self) -> None:
        """Cancel the job, and say what became of it."""
        self._progress.update(self._task, description="cancelling")
        console = self._progress.console
        until_s = time.monotonic() + _CANCEL_S
        try:
            if self._job_id is None:
                # the call may have arrived; its key finds the job, or makes one to cancel
                self._job_id = ask_again(
                    self._create, until_s=until_s, console=console, is_known=False
                ).id
            cancel = partial(self._service.cancel_job, self._job_id)
            job = ask_again(cancel, until_s=until_s, console=console)
        except RayClusterError as error:
            console.print(self._not_cancelled(error), markup=False)
            return
        if job.state == "cancelled":
            console.print(f"cancelled {job.id}", markup=False)
        else:
            console.print(f"{job.id} had {job.state} already", markup=False)

    def _accepted(self) -> JobResponse:
        console = self._progress.console
        try:
            return ask_again(self._create, until_s=self._until_s, console=console, is_known=False)
        except NoAnswer as error:
            if error.kind != "away":
                raise
            raise GenerateFailed(
                f"{error}, or make the image here, without --url and RAY_CLUSTER_URL"
            ) from error

    def _ask(self, call: Callable[[], AnswerT]) -> AnswerT:
        try:
            return ask_again(call, until_s=self._until_s, console=self._progress.console)
        except NoAnswer as error:
            raise self._too_late(str(error)) from error

    def _show(self, job: JobResponse) -> None:
        waits = job.state == "queued" and job.queue_position is not None
        self._progress.update(
            self._task,
            description=f"waiting, {job.queue_position} before it" if waits else "denoising",
            total=job.num_steps,
            completed=job.step,
        )

    def _write_previews(self, job: JobResponse) -> None:
        for preview in job.previews:
            if not self._previews.is_newer(preview.image, preview.step):
                continue
            try:
                data = self._service.file(preview.url)
            except (ServiceFailed, InvalidRequest):
                # worth no second try: the image itself is under way
                continue
            path = self._previews.write(preview.image, preview.step, data)
            self._progress.console.print(f"step {preview.step}: preview in {path}", markup=False)

    def _too_late(self, why: str) -> GenerateFailed:
        job_id, base = str(self._job_id), self._service.base
        return GenerateFailed(
            f"no image after {self._timeout_s:g} s (--timeout): {why}. The job goes on: see "
            f"'{jobs_command('watch', job_id, base)}', then "
            f"'{jobs_command('fetch', job_id, base)}'"
        )

    def _not_cancelled(self, error: RayClusterError) -> str:
        if self._job_id is None:
            return f"no job was found to cancel: {error}"
        return (
            f"{self._job_id} is perhaps not cancelled: {error}. Try "
            f"'{jobs_command('cancel', self._job_id, self._service.base)}'"
        )
