"""Enlarges finished images."""

from __future__ import annotations

import io

from PIL import Image


def enlarged(png: bytes, factor: int) -> Image.Image:
    """Return an image ``factor`` times as wide and as high, by Lanczos interpolation.

    Args:
        png: as :func:`.encoder.encode_image` makes it.

    Raises:
        ValueError, OSError: it is no such png, or a damaged one.
    """
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        size = image.width * factor, image.height * factor
        return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
