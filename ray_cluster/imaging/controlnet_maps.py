"""The maps that ControlNets follow, made of the images that clients send."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ray_cluster.imaging.decoding import decoded, on_white
from ray_cluster.imaging.detectors import Detectors, Pixels
from ray_cluster.imaging.edit_images import resized, window_pixels
from ray_cluster.imaging.encoder import PNG_COMPRESS_LEVEL
from ray_cluster.policies.edits import Box, SizePx

# levels between the channels of what is grey; the share of a picture that is not
_GREY, _COLOURED_SHARE = 24, 0.1
# a map's, of 16 levels a channel: of a segmentation 150, and what lies between two of them
_MAP_COLOURS = 256


@dataclass(frozen=True, slots=True)
class MapOrder:
    """How a map is made of an image.

    Attributes:
        detector: name of the one that makes it.
        work_px: width and height of the map; None for those of the image.
        canvas_px: of an edit, the size to which its template is brought; None for text to image,
            where the image is brought to the size of the map in one step.
        window: what the model sees of the canvas; None for all of it.
        folder: of the detectors' weights; see :class:`.detectors.Detectors`.
        param: what the image is called in errors.
        detector_param: what the detector is called there.
    """

    detector: str
    work_px: SizePx | None
    canvas_px: SizePx | None = None
    window: Box | None = None
    folder: str = ""
    param: str = "image"
    detector_param: str = "preprocess"


@dataclass(frozen=True, slots=True)
class ControlMap:
    """A map.

    Attributes:
        png: of three channels.
        size_px: its width and height.
        is_picture: whether it is what was sent, and has the colours of a picture.
    """

    png: bytes
    size_px: SizePx
    is_picture: bool = False


def control_map(data: bytes, order: MapOrder, max_pixels: int) -> ControlMap:
    """Decode an image, bring it to the size that the model works on, and run the detector on it.

    Resized as diffusers resizes control images, by Lanczos; of an edit, cut as its template is.

    Args:
        max_pixels: most that the image may have.

    Raises:
        InvalidRequest: the image cannot be decoded, or the detector cannot be run.
    """
    image = on_white(decoded(data, order.param, max_pixels))
    found = Detectors(order.folder).detect(
        _seen(image, order), order.detector, order.detector_param
    )
    picture = Image.fromarray(found)
    if order.work_px is not None:
        # controlnet-aux's have sides of their own
        picture = resized(picture, order.work_px)
    elif picture.size != image.size:
        picture = resized(picture, image.size)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=PNG_COMPRESS_LEVEL)
    is_picture = order.detector == "none" and _has_many_colours(np.asarray(picture))
    return ControlMap(buffer.getvalue(), picture.size, is_picture)


def _has_many_colours(pixels: Pixels) -> bool:
    """Whether an image is neither grey nor painted in some colours, as maps are."""
    least, most = pixels.min(axis=2), pixels.max(axis=2)
    if np.mean(most - least > _GREY) < _COLOURED_SHARE:
        return False
    codes = (pixels.astype(np.uint16) >> 4) @ np.array([256, 16, 1], np.uint16)
    return np.unique(codes).size > _MAP_COLOURS


def _seen(image: Image.Image, order: MapOrder) -> Pixels:
    """Return what the model sees of an image, of the size of its work."""
    if order.work_px is None:
        return np.array(image)
    if order.canvas_px is None:
        return np.array(resized(image, order.work_px))
    canvas = np.array(resized(image, order.canvas_px))
    return window_pixels(canvas, order.window, order.work_px)
