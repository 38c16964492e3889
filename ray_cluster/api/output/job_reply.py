"""Writes a job as the API shows it."""

from __future__ import annotations

from collections.abc import Callable

from ray_cluster.api.errors import from_failure
from ray_cluster.api.input.schemas import ImageTiming
from ray_cluster.api.output.cascade_reply import cascade_card
from ray_cluster.api.output.reply_writer import (
    as_made,
    control_cards,
    edit_card,
    lora_cards,
    size_text,
)
from ray_cluster.api.output.resource_schemas import (
    ErrorDetail,
    JobDeadline,
    JobImage,
    JobPreview,
    JobResponse,
)
from ray_cluster.api.resolve.fidelity import fidelity_of
from ray_cluster.protocol.jobs import Job, JobView, StoredImage
from ray_cluster.requests import ImageRequest

UrlOf = Callable[[str], str]
"""Returns the URL of a stored image by its file id."""


def job_reply(view: JobView, url_of: UrlOf, now_s: float) -> JobResponse:
    """Return a job as its client sees it.

    Args:
        now_s: Unix time.
    """
    job, first = view.job, view.job.requests[0]
    open_images = [one for one in view.progress if one is not None]
    is_done = job.state == "completed"
    num_made = len(job.requests) if is_done else view.num_made
    waits = [one.position for one in open_images if one.position is not None]
    predictions = [one.predicted_s for one in open_images]
    known = [one for one in predictions if one is not None]
    images = zip(job.requests, job.images, strict=True) if is_done else ()
    return JobResponse(
        id=job.job_id,
        state=job.state,
        created=job.created_s,
        finished=job.finished_s,
        model=first.called_model,
        prompt=first.prompt,
        size=size_text(first),
        loras=lora_cards(first),
        controlnets=control_cards(first),
        n=len(job.requests),
        step=sum(one.steps_done for one in open_images) + num_made * first.num_steps,
        num_steps=len(job.requests) * first.num_steps,
        fidelity=fidelity_of(first),
        queue_position=min(waits, default=None),
        predicted_finish=now_s + max(known) if known and len(known) == len(predictions) else None,
        cascade_stages=[one.stage for one in open_images if one.stage is not None],
        attempts=job.attempts + sum(one.attempts for one in open_images),
        deadline=_deadline(job, now_s),
        error=_error(job),
        previews=_previews(view, url_of) if view.progress else [],
        data=[_image(request, one, url_of) for request, one in images if one is not None],
    )


def _deadline(job: Job, now_s: float) -> JobDeadline:
    end_s = job.finished_s if job.finished_s is not None else now_s
    is_late = end_s - job.created_s > job.slo_s
    met = None
    if job.is_final or is_late:
        met = job.state == "completed" and not is_late
    return JobDeadline(slo_s=job.slo_s, met=met)


def _error(job: Job) -> ErrorDetail | None:
    if job.error is None:
        return None
    error = from_failure(job.error)
    return ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)


def _previews(view: JobView, url_of: UrlOf) -> list[JobPreview]:
    images = zip(view.job.requests, view.progress, strict=True)
    return [
        JobPreview(
            url=url_of(request.preview_file_id(progress.preview.index)),
            image=number,
            index=progress.preview.index,
            step=progress.preview.steps_done,
        )
        for number, (request, progress) in enumerate(images)
        if progress is not None and progress.preview is not None
    ]


def _image(request: ImageRequest, image: StoredImage, url_of: UrlOf) -> JobImage:
    timing, request = image.timing, as_made(request, image.num_steps, image.cascade)
    return JobImage(
        url=url_of(image.file_id),
        seed=request.seed,
        num_inference_steps=request.schedule_steps,
        fidelity=fidelity_of(request),
        num_bytes=image.num_bytes,
        timing=None if timing is None else ImageTiming(**timing.as_dict(), total_s=timing.total_s),
        cascade=None if image.cascade is None else cascade_card(image.cascade),
        edit=edit_card(request),
        lora_start_step=request.add_ons.lora_start_step or None,
    )
