"""Images as discriminators get them: small, so that they travel in messages and need no store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from ray_cluster.requests import SMALL_SIDE_PX, SmallImage

Pixels = npt.NDArray[np.uint8]


def small_image(pixels: Pixels) -> SmallImage:
    """Return an image whose shorter side has at most ``SMALL_SIDE_PX``; smaller ones as they are.

    Args:
        pixels: ``[H, W, 3]`` uint8.
    """
    height, width = pixels.shape[:2]
    scale = SMALL_SIDE_PX / min(height, width)
    if scale < 1:
        size = round(width * scale), round(height * scale)
        resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        pixels = np.asarray(resized)
    return SmallImage(pixels.shape[1], pixels.shape[0], np.ascontiguousarray(pixels).tobytes())


def pixels_of(image: SmallImage) -> Pixels:
    """Return ``[H, W, 3]`` uint8, read-only."""
    flat = np.frombuffer(image.data, dtype=np.uint8)
    return flat.reshape(image.height_px, image.width_px, 3)
