"""Images to edit, masks of them, and whether an edit has kept what a mask spares."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def png(pixels: npt.NDArray[Any]) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def pixels_of(data: bytes) -> npt.NDArray[np.int_]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


@dataclass(frozen=True, slots=True)
class Template:
    """An image to edit, and a mask of a disc in it.

    Attributes:
        inside: ``[H, W]``, what is edited.
    """

    image: bytes
    mask: bytes
    inside: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, seed: int, side_px: int = 64) -> Template:
        """Return the template of a seed; the same one always."""
        numbers = np.random.default_rng(seed)
        image = numbers.integers(0, 256, (side_px // 8, side_px // 8, 3), dtype=np.uint8)
        rows, columns = np.mgrid[:side_px, :side_px]
        inside = np.hypot(rows - side_px / 2, columns - side_px / 2) < side_px / 3
        return cls(png(image.repeat(8, 0).repeat(8, 1)), mask_png(inside), inside)

    @property
    def fields(self) -> dict[str, Any]:
        """Of a JSON call."""
        return {name: base64.b64encode(getattr(self, name)).decode() for name in ("image", "mask")}

    def is_kept_in(self, data: bytes) -> bool:
        """Whether an edit has these pixels outside the mask, and others inside."""
        changed = (pixels_of(data) != pixels_of(self.image)).any(axis=2)
        return bool(not changed[~self.inside].any() and changed[self.inside].mean() > 0.8)


def mask_png(inside: npt.NDArray[np.bool_]) -> bytes:
    alpha = np.where(inside, 0, 255).astype(np.uint8)
    return png(np.stack([alpha, alpha], axis=2))
