"""Images and masks as files, for edits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def save_photo(path: Path, size_px: tuple[int, int] = (64, 64)) -> Path:
    """Write an image whose pixels all differ."""
    rows, columns = np.indices(size_px[::-1])
    pixels = np.dstack([rows * 3, columns * 3, rows + columns]).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def save_mask(path: Path, edited: tuple[slice, slice], size_px: tuple[int, int] = (64, 64)) -> Path:
    """Write a mask that leaves rows and columns to edit."""
    pixels = np.full((*size_px[::-1], 4), 255, np.uint8)
    pixels[edited] = 0
    Image.fromarray(pixels).save(path)
    return path


def pixels_of(path: Path) -> Pixels:
    """Return the pixels of a file."""
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def digest(path: Path) -> str:
    """Return the SHA-256 digest by which a recipe names a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
