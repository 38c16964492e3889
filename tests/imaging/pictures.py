"""Small images, and the files that clients may send of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ray_cluster.imaging.encoder import Pixels

RECIPE = {
    "prompt": "ein rötlicher Kreis\nauf 蓝色 🟦",
    "negative_prompt": "unscharf, brûlé",
    "seed": "7",
}


def gradient(width: int = 40, height: int = 24) -> Pixels:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 9, columns * 5, rows + columns], axis=-1).astype(np.uint8)


def pixels_of(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def file_of(image: Image.Image | npt.NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file, as Pillow writes it."""
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def mask_file(edited: npt.NDArray[np.bool_]) -> bytes:
    """Return a mask as clients send it: transparent where the image is to be edited."""
    pixels = np.zeros((*edited.shape, 4), np.uint8)
    pixels[..., 3] = np.where(edited, 0, 255)
    return file_of(pixels)


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()
