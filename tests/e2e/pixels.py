"""How far two images are apart."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def pixels_differ(png: bytes, other: bytes) -> int:

    one, two = (np.asarray(Image.open(io.BytesIO(data))).astype(int) for data in (png, other))
    return int(np.abs(one - two).max())


def enlargement(png: bytes, factor: int) -> bytes:
    """Return an image as Pillow enlarges it, as a png."""
    with Image.open(io.BytesIO(png)) as image:
        size = image.width * factor, image.height * factor
        coded = io.BytesIO()
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(coded, "PNG")
    return coded.getvalue()
