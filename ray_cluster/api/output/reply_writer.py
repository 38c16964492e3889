"""Writes the reply of a finished call.

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

from ray_cluster.api.input.controlnet_schema import ControlCard
from ray_cluster.api.input.lora_schema import LoraCard
from ray_cluster.api.input.schemas import EditCard
from ray_cluster.api.output.cascade_reply import cascade_card
from ray_cluster.api.resolve.fidelity import fidelity_of
from ray_cluster.protocol.outcomes import CascadeAnswer, Completed
from ray_cluster.requests import ImageRequest, Timing, with_steps

# a multiple of 3, so that the codes of slices join; about 1 ms of work
_SLICE_BYTES = 3 * 128 * 1024


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
    """

    request: ImageRequest
    data: bytes
    timing: Timing | None
    slo_s: float
    elapsed_s: float
    cascade: CascadeAnswer | None = None

    @classmethod
    def of(cls, request: ImageRequest, item: Completed) -> RepliedImage:
        """Return the image of an attached request."""
        result, made = item.result, as_made(request, item.num_steps, item.cascade)
        return cls(made, result.data, result.timing, item.slo_s, item.elapsed_s, item.cascade)


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
    """Return the JSON of :class:`~ray_cluster.api.input.schemas.ImagesResponse`.

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
    """Return the JSON of :class:`~ray_cluster.api.input.schemas.Deadline`."""
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
    if image.cascade is not None:
        details["cascade"] = cascade_card(image.cascade).model_dump()
    if (edit := edit_card(request)) is not None:
        details["edit"] = edit.model_dump()
    if loras := lora_cards(request):
        details["loras"] = [one.model_dump() for one in loras]
    if start := request.add_ons.lora_start_step:
        details["lora_start_step"] = start
    if controls := control_cards(request):
        details["controlnets"] = [one.model_dump() for one in controls]
    return details


def lora_cards(request: ImageRequest) -> list[LoraCard]:
    """Return the LoRAs that an image is made with."""
    return [LoraCard(name=one.name, scale=one.scale) for one in request.add_ons.loras]


def control_cards(request: ImageRequest) -> list[ControlCard]:
    """Return the ControlNets that an image follows."""
    return [
        ControlCard(
            name=one.name,
            scale=one.scale,
            start=one.start,
            end=one.end,
            preprocess=one.preprocess,
        )
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
