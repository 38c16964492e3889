"""The jobs of a coder process as messages: how each is written, run there, and answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_cluster.codec.values import TextCodec
from ray_cluster.imaging.controlnet_maps import ControlMap, MapOrder, control_map
from ray_cluster.imaging.decoding import not_decodable
from ray_cluster.imaging.detectors import BUILT_IN_NAMES
from ray_cluster.imaging.edit_images import (
    EditPixels,
    ImageFacts,
    MaskFacts,
    Paste,
    edit_pixels,
    finished,
    image_facts,
    mask_facts,
)
from ray_cluster.imaging.encoder import Pixels, encode_image, encoded
from ray_cluster.imaging.enlarging import enlarged
from ray_cluster.imaging.processes.allowance import Allowance, of_decoding
from ray_cluster.imaging.processes.worker_process import Bytes, Message
from ray_cluster.policies.edits import Box, SizePx
from ray_cluster.requests import Edit, OutputSpec

_EDITS: TextCodec[Edit] = TextCodec(Edit)
_MAP_ORDERS: TextCodec[MapOrder] = TextCodec(MapOrder)

Array = npt.NDArray[Any]

# what an edit's canvas takes beside its images, and a built-in detector beside its: measured 8 and
# 10 bytes, 0.1 s and 0.1 s of CPU per megapixel
_ADDED_BYTES_PER_PIXEL, _ADDED_CPU_S_PER_PIXEL = 16, 0.25e-6
# OpenCV has threads, each with a stack of its own
_OF_DETECTORS = Allowance(1 << 30, 10.0)
# of a network: its size depends on the image, and so does what it takes; the clock bounds its time
_OF_NETWORKS = Allowance(4 << 30, 0.0)


def run_task(job: Message) -> Message:
    """Run a job; the function of a coder process."""
    return _TASKS[job.header["task"]](job)


def encoding(
    pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str], paste: Paste | None
) -> Message:
    """Return the job that finishes an edit, if it is one, and encodes an image."""
    header = {"task": "encode", "spec": asdict(spec), "recipe": dict(recipe)}
    if paste is None:
        return _with_arrays(header, [pixels])
    window = None if paste.window is None else asdict(paste.window)
    return _with_arrays(header | {"window": window}, [pixels, *_arrays_of_edit(paste.pixels)])


def encoded_of(reply: Message) -> bytes:
    """Return the file that :func:`encoding` made."""
    return bytes(reply.parts[0])


def enlarging(png: bytes, factor: int, spec: OutputSpec, recipe: Mapping[str, str]) -> Message:
    """Return the job that enlarges a finished image, and encodes it; :func:`encoded_of` has it."""
    header = {"task": "enlarge", "spec": asdict(spec), "recipe": dict(recipe), "factor": factor}
    return Message(header, (png,))


def image_check(data: bytes, param: str, max_pixels: int) -> Message:
    """Return the job that says what an image is."""
    return Message({"task": "image", "param": param, "max_pixels": max_pixels}, (data,))


def image_facts_of(reply: Message) -> ImageFacts:
    """Return what :func:`image_check` found."""
    return ImageFacts(**reply.header)


def mask_check(data: bytes, param: str, max_pixels: int) -> Message:
    """Return the job that says what a mask is."""
    return Message({"task": "mask", "param": param, "max_pixels": max_pixels}, (data,))


def mask_facts_of(reply: Message) -> MaskFacts:
    """Return what :func:`mask_check` found."""
    return MaskFacts(**reply.header | {"box": Box(**reply.header["box"])})


def edit_decoding(image: bytes, mask: bytes | None, edit: Edit, work_px: SizePx) -> Message:
    """Return the job that decodes the images of an edit."""
    header = {"task": "edit", "edit": _EDITS.encode(edit), "work_px": work_px}
    return Message(header, (image,) if mask is None else (image, mask))


def edit_pixels_of(reply: Message) -> EditPixels:
    """Return what :func:`edit_decoding` made."""
    return _edit_of_arrays(_arrays_of(reply))


def map_making(data: bytes, order: MapOrder, max_pixels: int) -> Message:
    """Return the job that makes a ControlNet's map of an image."""
    header = {"task": "map", "order": _MAP_ORDERS.encode(order), "max_pixels": max_pixels}
    return Message(header, (data,))


def map_of(reply: Message) -> ControlMap:
    """Return what :func:`map_making` made."""
    width_px, height_px = reply.header["size_px"]
    return ControlMap(bytes(reply.parts[0]), (width_px, height_px), reply.header["is_picture"])


def _encode(job: Message) -> Message:
    pixels, *rest = _arrays_of(job)
    assert pixels is not None
    if rest:
        window = job.header["window"]
        pixels = finished(pixels, _edit_of_arrays(rest), None if window is None else Box(**window))
    data = encode_image(pixels, OutputSpec(**job.header["spec"]), job.header["recipe"])
    return Message({}, (data,))


def _enlarge(job: Message) -> Message:
    image = enlarged(bytes(job.parts[0]), job.header["factor"])
    return Message({}, (encoded(image, OutputSpec(**job.header["spec"]), job.header["recipe"]),))


def _check_image(job: Message) -> Message:
    data, param, max_pixels = _check_arguments(job)
    with of_decoding(data).enforced():
        return Message(asdict(image_facts(data, param, max_pixels)))


def _check_mask(job: Message) -> Message:
    data, param, max_pixels = _check_arguments(job)
    with of_decoding(data).enforced():
        return Message(asdict(mask_facts(data, param, max_pixels)))


def _check_arguments(job: Message) -> tuple[bytes, str, int]:
    return bytes(job.parts[0]), job.header["param"], job.header["max_pixels"]


def _decode_edit(job: Message) -> Message:
    image, *masks = map(bytes, job.parts)
    width, height = job.header["work_px"]
    edit = _EDITS.decode(job.header["edit"])
    allowance = of_decoding(image).plus(_added(edit.canvas_px)).plus(_added((width, height)))
    for one in masks:
        allowance = allowance.plus(of_decoding(one))
    with allowance.enforced():
        pixels = edit_pixels(image, masks[0] if masks else None, edit, (width, height))
        return _with_arrays({}, _arrays_of_edit(pixels))


def _make_map(job: Message) -> Message:
    order = _MAP_ORDERS.decode(job.header["order"])
    data, max_pixels = bytes(job.parts[0]), job.header["max_pixels"]
    allowance = _OF_NETWORKS
    if order.detector in BUILT_IN_NAMES:
        decoding = of_decoding(data)
        # twice: the map may be as large as the image
        allowance = decoding.plus(decoding).plus(_OF_DETECTORS)
        for size_px in (order.work_px, order.canvas_px):
            allowance = allowance.plus(_added(size_px or (0, 0)))
    try:
        with allowance.enforced():
            made = control_map(data, order, max_pixels)
    except MemoryError as error:
        reason = "its map takes more memory than one of its size may"
        raise not_decodable(order.param, reason) from error
    return Message({"size_px": made.size_px, "is_picture": made.is_picture}, (made.png,))


def _added(size_px: SizePx) -> Allowance:
    num_pixels = size_px[0] * size_px[1]
    return Allowance(num_pixels * _ADDED_BYTES_PER_PIXEL, num_pixels * _ADDED_CPU_S_PER_PIXEL)


_TASKS: Mapping[str, Callable[[Message], Message]] = {
    "encode": _encode,
    "enlarge": _enlarge,
    "image": _check_image,
    "mask": _check_mask,
    "edit": _decode_edit,
    "map": _make_map,
}


def _arrays_of_edit(pixels: EditPixels) -> list[Array | None]:
    return [pixels.work, pixels.mask, pixels.canvas, pixels.weights]


def _edit_of_arrays(arrays: Sequence[Array | None]) -> EditPixels:
    work, mask, canvas, weights = arrays
    assert work is not None
    assert canvas is not None
    return EditPixels(work, mask, canvas, weights)


def _with_arrays(header: dict[str, Any], arrays: Sequence[Array | None]) -> Message:
    """Return a message whose parts are arrays; where there is None, there is no part."""
    kinds = [None if one is None else [one.dtype.str, one.shape] for one in arrays]
    parts = tuple(_bytes_of(one) for one in arrays if one is not None)
    return Message(header | {"arrays": kinds}, parts)


def _bytes_of(array: Array) -> Bytes:
    # flat, as the bytes that it has: copied only if they are scattered
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _arrays_of(message: Message) -> list[Array | None]:
    parts = iter(message.parts)
    return [
        None if kind is None else np.frombuffer(next(parts), dtype=kind[0]).reshape(kind[1])
        for kind in message.header["arrays"]
    ]
