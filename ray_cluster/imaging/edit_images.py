"""The images of edits: what they are, the pixels that a model works on, and the finished image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.blending import Mask, Pixels, any_in, blend_in, blend_weights
from ray_cluster.imaging.decoding import (
    decoded,
    joined,
    on_white,
    opened,
    strips,
    upright,
    upright_size,
)
from ray_cluster.policies.edits import Box, SizePx
from ray_cluster.requests import Edit

_OPAQUE = 255
_BY_PILLOW = (
    "Of one that is white there, Pillow makes it by "
    "Image.merge('LA', [ImageOps.invert(mask.convert('L'))] * 2)."
)
_LEAST_KEPT_ALPHA = 128
_EDITED = 255

_Value = TypeVar("_Value", np.uint8, np.bool_)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What is known of an image that could be decoded whole.

    Attributes:
        width_px: as it is seen, turned as its EXIF data says.
        has_alpha: whether some of its pixels are not opaque.
    """

    width_px: int
    height_px: int
    has_alpha: bool


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """What is known of a mask.

    Attributes:
        ratio: share of its pixels that are to be edited: alpha below 128.
        box: bounds of these.
    """

    width_px: int
    height_px: int
    ratio: float
    box: Box


@dataclass(frozen=True, slots=True)
class EditPixels:
    """An edit's images, decoded and brought to their sizes.

    Attributes:
        work: ``[h, w, 3]`` uint8, what the model sees, of the request's size.
        mask: ``[h, w]``, what of it is edited; None for all.
        canvas: ``[H, W, 3]`` uint8, the template in the size of the image that is returned.
        weights: ``[H, W]`` uint8, how much of the edit is seen there, 0 outside the mask;
            None where nothing is pasted back.
    """

    work: Pixels
    mask: Mask | None
    canvas: Pixels
    weights: Pixels | None


@dataclass(frozen=True, slots=True)
class SentPixels:
    """The images that a request is made from, but for its maps.

    Attributes:
        edit: None for no edit.
        references: ``[h, w, 3]`` uint8 each, of the sizes that the request names.
    """

    edit: EditPixels | None = None
    references: tuple[Pixels, ...] = ()


@dataclass(frozen=True, slots=True)
class Paste:
    """Where the image that a model has made of an edit goes.

    Attributes:
        window: what the model saw of the canvas; None for all of it.
    """

    pixels: EditPixels
    window: Box | None


def image_facts(data: bytes, param: str, max_pixels: int) -> ImageFacts:
    """Decode an image and return what it is.

    Raises:
        InvalidRequest: names ``param``; no image that can be decoded, more pixels than allowed, or
            several frames.
    """
    with opened(data, param, max_pixels) as image:
        size_px = image.size
        # of a jpeg, all is read, and an eighth of its rows and columns made of that
        image.draft(None, (1, 1))
        image.load()
        has_alpha = any(map(_has_alpha, strips(image)))
        return ImageFacts(*upright_size(size_px, image), has_alpha)


def _has_alpha(strip: Image.Image) -> bool:
    return strip.mode == "RGBA" and strip.getchannel("A").getextrema() != (_OPAQUE, _OPAQUE)


def mask_facts(data: bytes, param: str, max_pixels: int) -> MaskFacts:
    """Decode a mask and return what it is; errors as of :func:`image_facts`.

    Raises:
        InvalidRequest: likewise for one without an alpha channel, or that leaves nothing to edit.
    """
    edited = _edited(data, param, max_pixels)
    bounds = edited.getbbox()
    if bounds is None:
        raise InvalidRequest(
            f"{param!r} leaves nothing to edit: its alpha is {_LEAST_KEPT_ALPHA} or more "
            "everywhere. Make it transparent (alpha 0) where the image is to be edited. "
            f"{_BY_PILLOW}",
            param,
            "invalid_image",
        )
    left, top, right, bottom = bounds
    ratio = edited.histogram()[_EDITED] / (edited.width * edited.height)
    return MaskFacts(edited.width, edited.height, ratio, Box(left, top, right - left, bottom - top))


def edit_pixels(image: bytes, mask: bytes | None, edit: Edit, work_px: SizePx) -> EditPixels:
    """Return the pixels of an edit whose images have passed the checks.

    Args:
        work_px: width and height of what the model sees. A window that fits is filled up with its
            own last pixels at its right and lower edge; a larger one is scaled down first, in its
            proportions, until it fits.

    Raises:
        InvalidRequest: they cannot be decoded after all.
    """
    canvas = np.array(resized(on_white(decoded(image, "image")), edit.canvas_px))
    work = window_pixels(canvas, edit.window, work_px)
    if mask is None:
        return EditPixels(work, None, canvas, None)
    edited = _edited(mask, "mask")
    on_canvas = any_in(np.asarray(edited) == _EDITED, edit.canvas_px)
    window = edit.window or Box(0, 0, *edit.canvas_px)
    content_px = _content_px(window.size_px, work_px)
    work_mask = _filled_up(any_in(on_canvas[_part(window)], content_px), work_px)
    weights = blend_weights(on_canvas, edit.feather_px) if edit.paste_back else None
    return EditPixels(work, work_mask, canvas, weights)


def window_pixels(canvas: Pixels, window: Box | None, work_px: SizePx) -> Pixels:
    """Return what the model sees of a canvas ``[H, W, 3]``, in the size that it works on.

    Args:
        window: None for all of the canvas; see :func:`edit_pixels` for how it is brought to size.
    """
    height_px, width_px = canvas.shape[:2]
    place = window or Box(0, 0, width_px, height_px)
    content_px = _content_px(place.size_px, work_px)
    return _filled_up(_resized_pixels(canvas[_part(place)], content_px), work_px)


def finished(made: Pixels, edit: EditPixels, window: Box | None) -> Pixels:
    """Return the image that is returned: what was made, in its place on the canvas.

    Args:
        made: ``[h, w, 3]`` uint8, of the model; of the size of ``edit.work``.
    """
    if made.shape != edit.work.shape:
        raise ValueError(f"made {list(made.shape)} of pixels {list(edit.work.shape)}")
    height_px, width_px = edit.canvas.shape[:2]
    place = window or Box(0, 0, width_px, height_px)
    content_px = _content_px(place.size_px, (made.shape[1], made.shape[0]))
    part = _resized_pixels(made[: content_px[1], : content_px[0]], place.size_px)
    result = edit.canvas.copy()
    if edit.weights is None:
        result[_part(place)] = part
    else:
        blend_in(result[_part(place)], part, edit.weights[_part(place)])
    return result


def _edited(data: bytes, param: str, max_pixels: int | None = None) -> Image.Image:
    """Return where a mask is transparent, as ``_EDITED`` and 0."""
    with opened(data, param, max_pixels) as image:
        image.load()
        parts = (_edited_part(strip, param) for strip in strips(image))
        return upright(joined(parts, "L", image.size), image)


def _edited_part(strip: Image.Image, param: str) -> Image.Image:
    if strip.mode != "RGBA":
        raise InvalidRequest(
            f"{param!r} has no alpha channel; a mask is a PNG or WebP that is transparent where "
            f"the image is to be edited. {_BY_PILLOW}",
            param,
            "invalid_image",
        )
    kept = 256 - _LEAST_KEPT_ALPHA
    return strip.getchannel("A").point([_EDITED] * _LEAST_KEPT_ALPHA + [0] * kept)


def _content_px(window_px: SizePx, work_px: SizePx) -> SizePx:
    """Return how much of the model's image shows the window; the rest at the edges is filling."""
    scale = min(1.0, *(work / side for work, side in zip(work_px, window_px, strict=True)))
    width, height = (
        min(work, max(1, round(side * scale)))
        for work, side in zip(work_px, window_px, strict=True)
    )
    return (width, height)


def _part(box: Box) -> tuple[slice, slice]:
    """Return the index of a box in ``[H, W, ...]``."""
    return (
        slice(box.top_px, box.top_px + box.height_px),
        slice(box.left_px, box.left_px + box.width_px),
    )


def resized(image: Image.Image, size_px: SizePx) -> Image.Image:
    """Return an image at another size."""
    return image if image.size == size_px else image.resize(size_px, Image.Resampling.LANCZOS)


def _resized_pixels(pixels: Pixels, size_px: SizePx) -> Pixels:
    if (pixels.shape[1], pixels.shape[0]) == size_px:
        return pixels
    return np.array(resized(Image.fromarray(np.ascontiguousarray(pixels)), size_px))


def _filled_up(pixels: npt.NDArray[_Value], size_px: SizePx) -> npt.NDArray[_Value]:
    """Return an array of its own that repeats the last column and row up to a size."""
    height, width = pixels.shape[:2]
    missing = [(0, size_px[1] - height), (0, size_px[0] - width)]
    return np.pad(pixels, missing + [(0, 0)] * (pixels.ndim - 2), mode="edge")
