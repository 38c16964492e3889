"""The images that clients send: what they are, and the pixels that an edit works on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.edits import Box, SizePx
from ray_cluster.requests import Edit

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


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
        weights: ``[H, W]`` uint8, how much of the edit is seen, 0 outside the mask; None where
            nothing is pasted back.
    """

    work: Pixels
    mask: Mask | None
    canvas: Pixels
    weights: Pixels | None


def image_facts(data: bytes, param: str, max_pixels: int) -> ImageFacts:
    """Decode an image and return what it is.

    Raises:
        InvalidRequest: names ``param``; no image that can be decoded, more pixels than allowed, or
            several frames.
    """
    raise NotImplementedError


def mask_facts(data: bytes, param: str, max_pixels: int) -> MaskFacts:
    """Decode a mask and return what it is; errors as of :func:`image_facts`.

    Raises:
        InvalidRequest: likewise for one without an alpha channel, or that leaves nothing to edit.
    """
    raise NotImplementedError


def edit_pixels(image: bytes, mask: bytes | None, edit: Edit, work_px: SizePx) -> EditPixels:
    """Return the pixels of an edit whose images have passed the checks."""
    raise NotImplementedError


def finished(made: Pixels, edit: EditPixels, window: Box | None) -> Pixels:
    """Return the image that is returned: what was made, in its place on the canvas.

    Args:
        made: ``[h, w, 3]`` uint8, of the model.
    """
    raise NotImplementedError
