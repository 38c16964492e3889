"""Images from a running service, as a durable job: a lost connection loses nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from ray_cluster.api.replies import JobResponse
from ray_cluster.cli.commands import jobs_command
from ray_cluster.cli.job_images import check_completed, images_of
from ray_cluster.cli.made import GenerateFailed, MadeImages
from ray_cluster.cli.patience import ask_again
from ray_cluster.cli.preview_files import PreviewFiles
from ray_cluster.cli.remote_service import NoAnswer, RemoteService, ServiceFailed
from ray_cluster.cli.signals import StopSignals
from ray_cluster.cli.step_bar import step_progress
from ray_cluster.errors import InvalidRequest, RayClusterError

AnswerT = TypeVar("AnswerT")

_POLL_S = 0.3
_GIVE_UP_S = 5.0


def generate_there(
    service: RemoteService,
    body: Mapping[str, Any],
    timeout_s: float,
    previews: PreviewFiles,
    console: Console,
) -> MadeImages:
    """Have images made, with the steps on the console. Ctrl-C or SIGTERM cancels the job.

    Raises:
        InvalidRequest: a parameter is wrong.
        RayClusterError: the service cannot be reached, is full, failed, or took too long.
    """
    with StopSignals() as signals, step_progress(console) as progress:
        call = _RemoteCall(service, body, timeout_s, previews, progress)
        try:
            signals.arm()
            return call.make()
        except KeyboardInterrupt:
            call.give_up()
            raise


class _RemoteCall:
    """One call as a job, from its key to its images."""

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

    def make(self) -> MadeImages:
        job = self._accepted()
        self._job_id = job.id
        while job.finished is None:
            self._show(job)
            self._show_previews(job)
            if time.monotonic() > self._until_s:
                raise self._too_late("it is not done")
            time.sleep(_POLL_S)
            job = self._ask(partial(self._service.job, job.id))
        self._show(job)
        check_completed(job)
        return images_of(job, lambda image: self._ask(partial(self._service.file, image.url)))

    def give_up(self) -> None:
        """Cancel the job, and say what became of it."""
        self._progress.update(self._task, description="cancelling")
        console = self._progress.console
        until_s = time.monotonic() + _GIVE_UP_S
        try:
            if self._job_id is None:
                # the call may have been taken; its key finds the job, or makes one to cancel
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
                f"{error}, or leave --url out to make the image in this process"
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

    def _show_previews(self, job: JobResponse) -> None:
        for preview in job.previews:
            if not self._previews.is_news(preview.image, preview.step):
                continue
            try:
                data = self._service.file(preview.url)
            except (ServiceFailed, InvalidRequest):
                # worth no second try: the image itself is under way
                continue
            path = self._previews.show(preview.image, preview.step, data)
            self._progress.console.print(f"step {preview.step}: preview in {path}", markup=False)

    def _too_late(self, why: str) -> GenerateFailed:
        job_id, base = str(self._job_id), self._service.base
        return GenerateFailed(
            f"no image after {self._timeout_s:g} s (--timeout): {why}. The job goes on: see "
            f"'{jobs_command('watch', job_id, base)}', then "
            f"'{jobs_command('fetch', job_id, base)}'"
        )

    def _not_cancelled(self, error: RayClusterError) -> str:
        base = self._service.base
        if self._job_id is None:
            return f"no job was found to cancel: {error}"
        return (
            f"{self._job_id} is perhaps not cancelled: {error}. Try "
            f"'{jobs_command('cancel', self._job_id, base)}'"
        )
