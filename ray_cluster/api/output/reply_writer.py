"""Writes finished images, and jobs, as replies show them.

Base64 holds the GIL (a thread would stop the event loop just as long): 2.3 ms per MB on a laptop
core, and ``json.dumps`` of its result another 6. So images are coded in slices, with the loop
running in between, and spliced into the JSON: base64 needs no escapes.
"""

from __future__ import annotations

import asyncio
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_cluster.api.output.error_answers import from_failure
from ray_cluster.api.output.image_schemas import (
    CascadeCard,
    ControlNetUseCard,
    EditCard,
    ImageFidelity,
    ImageTiming,
    LoraCard,
    StageCard,
)
from ray_cluster.api.output.resource_schemas import (
    ErrorDetail,
    JobDeadline,
    JobImage,
    JobPreview,
    JobResponse,
)
from ray_cluster.api.output.warnings import warnings_of
from ray_cluster.policies.fidelity import Terms
from ray_cluster.protocol.jobs import Job, JobView, StoredImage
from ray_cluster.protocol.outcomes import CascadeAnswer, Completed
from ray_cluster.requests import ImageRequest, Timing, with_steps

# a multiple of 3, so that the codes of slices join; about 1 ms of work
_SLICE_BYTES = 3 * 128 * 1024

UrlOf = Callable[[str], str]
"""Returns the URL of a stored image by its file id."""


@dataclass(frozen=True, slots=True)
class RepliedImage:
    """A finished image in a reply.

    Attributes:
        request: with the steps that it was made with.
        data: the coded image; empty where the reply links to it.
        timing: None where a dispatcher died before it could be noted.
        slo_s: seconds from arrival to the deadline.
        elapsed_s: seconds from arrival to completion.
        cascade: how it was routed; None for a request that names a single model.
        steps_by_degree: see :class:`ray_cluster.requests.ImageResult`.
    """

    request: ImageRequest
    data: bytes
    timing: Timing | None
    slo_s: float
    elapsed_s: float
    cascade: CascadeAnswer | None = None
    steps_by_degree: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, request: ImageRequest, item: Completed) -> RepliedImage:
        """Return the image of an attached request."""
        result, made = item.result, as_made(request, item.num_steps, item.cascade)
        return cls(
            made,
            result.data,
            result.timing,
            item.slo_s,
            item.elapsed_s,
            item.cascade,
            result.steps_by_degree,
        )


def as_made(
    request: ImageRequest, num_steps: int | None, answer: CascadeAnswer | None
) -> ImageRequest:
    """Return a request with the model and the steps that its image was made with."""
    is_light = answer is not None and answer.stage == "light"
    made = request.light or request if is_light else request
    return made if num_steps is None else with_steps(made, num_steps)


async def write_reply(
    images: Sequence[RepliedImage], created_s: int, url_of: Callable[[str], str] | None = None
) -> bytes:
    """Return the JSON of :class:`~ray_cluster.api.output.image_schemas.ImagesResponse`.

    Args:
        url_of: returns the link to a stored image by its file id; None puts images into the reply.
    """
    first = images[0].request
    head = {
        "created": created_s,
        "model": first.called_model,
        "background": "opaque",
        "output_format": first.output.image_format,
        "quality": quality_of(first),
        "size": size_text(first),
        "deadline": deadline_of(images),
    }
    parts = [json.dumps(head).encode()[:-1], b', "data": [']
    for index, image in enumerate(images):
        parts.append(b"{" if index == 0 else b", {")
        if url_of is not None:
            parts.append(b'"url": ' + json.dumps(url_of(image.request.file_id)).encode())
        else:
            parts.append(b'"b64_json": "')
            await append_base64(parts, image.data)
            parts.append(b'"')
        parts.append(b", " + json.dumps(details_of(image)).encode()[1:])
    parts.append(b"]}")
    return b"".join(parts)


def quality_of(request: ImageRequest) -> str:
    """Return the quality that counted, as the API writes it: it chooses a cascade's model."""
    use = request.cascade
    if use is None or use.reason != "quality":
        return "auto"
    return "low" if use.entry == "light" else "high"


def size_text(request: ImageRequest) -> str:
    """Return an image's size as the API writes it."""
    return "{}x{}".format(*request.output_px)


def deadline_of(images: Sequence[RepliedImage]) -> dict[str, Any]:
    """Return the JSON of :class:`~ray_cluster.api.output.image_schemas.Deadline`."""
    return {
        "slo_s": images[0].slo_s,
        "elapsed_s": max(image.elapsed_s for image in images),
        "met": all(image.elapsed_s <= image.slo_s for image in images),
    }


async def append_base64(parts: list[bytes], data: bytes) -> None:
    """Append an image in base64, with the event loop running in between."""
    for start in range(0, len(data), _SLICE_BYTES):
        piece = memoryview(data)[start : start + _SLICE_BYTES]
        parts.append(binascii.b2a_base64(piece, newline=False))
        if len(piece) == _SLICE_BYTES:
            await asyncio.sleep(0)


def details_of(image: RepliedImage) -> dict[str, Any]:
    """Return the JSON of one image without the image itself."""
    request = image.request
    details: dict[str, Any] = {"seed": request.seed, "num_inference_steps": request.schedule_steps}
    details["fidelity"] = fidelity_of(request).model_dump()
    if image.timing is not None:
        timing = {**image.timing.as_dict(), "total_s": image.elapsed_s}
        details["timing"] = {name: round(seconds, 6) for name, seconds in timing.items()}
    if image.steps_by_degree:
        details["steps_by_degree"] = dict(image.steps_by_degree)
    if image.cascade is not None:
        details["cascade"] = cascade_card(image.cascade).model_dump()
    if (edit := edit_card(request)) is not None:
        details["edit"] = edit.model_dump()
    if loras := lora_cards(request):
        details["loras"] = [one.model_dump() for one in loras]
    if start := request.add_ons.lora_start_step:
        details["lora_start_step"] = start
    if controls := controlnet_cards(request):
        details["controlnets"] = [one.model_dump() for one in controls]
    if warnings := warnings_of(request):
        details["warnings"] = warnings
    return details


def lora_cards(request: ImageRequest) -> list[LoraCard]:
    """Return the LoRAs that an image is made with."""
    return [LoraCard(name=one.name, scale=one.scale) for one in request.add_ons.loras]


def controlnet_cards(request: ImageRequest) -> list[ControlNetUseCard]:
    """Return the ControlNets that an image follows."""
    names = ControlNetUseCard.model_fields
    return [
        ControlNetUseCard(**{name: getattr(one, name) for name in names})
        for one in request.add_ons.controls
    ]


def edit_card(request: ImageRequest) -> EditCard | None:
    """Return how an image was edited; None for one from text."""
    edit = request.edit
    if edit is None:
        return None
    box = edit.window
    crop = None if box is None else [box.left_px, box.top_px, box.width_px, box.height_px]
    return EditCard(strength=edit.strength, mask_ratio=round(edit.mask_ratio, 6), crop=crop)


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
        controlnets=controlnet_cards(first),
        warnings=warnings_of(first),
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
        steps_by_degree=dict(image.steps_by_degree) or None,
        lora_start_step=request.add_ons.lora_start_step or None,
    )


def cascade_card(answer: CascadeAnswer) -> CascadeCard:
    """Return an answer as replies show it."""
    return CascadeCard(
        model=answer.model,
        stage=answer.stage,
        reason=answer.reason,
        confidence=_rounded(answer.confidence),
        threshold=_rounded(answer.threshold),
        stages=[
            StageCard(stage=one.stage, name=one.name, queue_s=queue_s, took_s=took_s)
            for one in answer.stages
            for queue_s, took_s in [(round(one.queue_s, 6), round(one.took_s, 6))]
        ],
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def fidelity_of(request: ImageRequest) -> ImageFidelity:
    """Return an image's fidelity as replies show it.

    Args:
        request: with the steps that it is made with.
    """
    num_steps = request.num_steps
    terms = request.terms or Terms("exact", num_steps, num_steps)
    spent = terms.spent(num_steps)
    num_reused = 0
    if terms.reuse is not None:
        num_reused = num_steps - terms.reuse.schedule.num_full(num_steps)
    return ImageFidelity(
        asked=terms.asked,
        got=terms.fidelity(num_steps),
        steps_asked=terms.num_steps,
        steps_computed=num_steps - num_reused,
        steps_reused=num_reused,
        max_ssim_loss=terms.max_loss,
        budget_spent=None if spent is None else round(spent, 3),
    )
