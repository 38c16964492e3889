"""Enlarges finished images."""

from __future__ import annotations

import io

from PIL import Image

# of a replica with its processes, 160 MiB measured while it enlarges nothing; then of each pixel
# while they code webp, which takes most
_IDLE_BYTES = 200 << 20
_PIXEL_BYTES, _NUM_AT_ONCE = 25, 2


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


def replica_memory(max_px: int) -> int:
    """Return the bytes that a replica takes at most, for sides up to ``max_px``."""
    return _IDLE_BYTES + _NUM_AT_ONCE * _PIXEL_BYTES * max_px**2
