"""Colours of files that are not sRGB's: brought there as viewers do, by littlecms."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image, ImageCms

Convert = Callable[[Image.Image], Image.Image]
"""Takes some rows of an image in its file's mode (in RGB where that has a palette, grey of 8 bits
where it is deeper), without transparency, to RGB of sRGB."""

# of a profile, the space that its colours are in; and the modes that may have it
_MODES = {
    "RGB": ("RGB", "RGBA", "P", "PA"),
    "GRAY": ("L", "LA", "1", "I;16", "I"),
    "CMYK": ("CMYK",),
}
_INPUTS = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
# levels by which littlecms' rounding changes what is sRGB already
_ROUNDING = 1
_NUM_SAMPLES = 9


def to_srgb(image: Image.Image) -> Convert | None:
    """Return how an image's colours become those of sRGB; None where they are, or nobody can tell.

    Args:
        image: opened, perhaps not decoded yet.
    """
    given = image.info.get("icc_profile")
    if not isinstance(given, bytes) or not given:
        return None
    try:
        profile = ImageCms.getOpenProfile(io.BytesIO(given))
        space = profile.profile.xcolor_space.strip()
        if image.mode not in _MODES.get(space, ()):
            # as viewers do
            return None
        mode = _INPUTS[space]
        transform = ImageCms.buildTransform(profile, _srgb(), mode, "RGB")
        if space != "CMYK" and _changes_nothing(transform, mode):
            return None
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        # a damaged profile changes no pixel
        return None

    def convert(rows: Image.Image) -> Image.Image:
        found = ImageCms.applyTransform(
            rows if rows.mode == mode else rows.convert(mode), transform
        )
        assert found is not None, "it is not in place"
        return found

    return convert


def _changes_nothing(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    levels = np.linspace(0, 255, _NUM_SAMPLES).round().astype(np.uint8)
    red, green, blue = np.meshgrid(levels, levels, levels)
    sample = Image.fromarray(np.stack([red, green, blue], axis=-1).reshape(_NUM_SAMPLES, -1, 3))
    plain = sample.convert(mode)
    found = ImageCms.applyTransform(plain, transform)
    before = np.asarray(plain.convert("RGB")).astype(int)
    return bool(np.abs(np.asarray(found).astype(int) - before).max() <= _ROUNDING)


@cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
