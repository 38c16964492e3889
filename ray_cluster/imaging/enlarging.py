"""Enlarges finished images."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from ray_cluster.imaging.encoder import Pixels


def enlarged(png: bytes, factor: int) -> Pixels:
    """Return an image ``factor`` times as wide and as high, by Lanczos interpolation.

    Args:
        png: as :func:`.encoder.encode_image` makes it.

    Returns:
        ``[H, W, 3]`` uint8.

    Raises:
        ValueError, OSError: it is no such png, or a damaged one.
    """
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        size = image.width * factor, image.height * factor
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))
