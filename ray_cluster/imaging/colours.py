"""Colours of files that are not sRGB's: brought there as viewers do, by littlecms."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
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
IS_GREY = "is_grey"
"""In what is known of an image: that its file has grey alone, whatever its mode."""

_INPUTS = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
# levels by which littlecms' rounding changes what is sRGB already
_ROUNDING = 1
_NUM_SAMPLES = 9
# of PNGs: x and y of white, red, green and blue, and the exponent of what they hold
_SRGB_PLACES = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
_USUAL_GAMMA, _NEAR = 1 / 2.2, 0.005
_D50 = np.array([0.9642, 1.0, 0.8249])
# Bradford's cone responses (ICC.1:2022, annex E)
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def to_srgb(image: Image.Image) -> Convert | None:
    """Return how an image's colours become those of sRGB; None where they are, or nobody can tell.

    Args:
        image: opened, perhaps not decoded yet.
    """
    try:
        given = image.info.get("icc_profile") or _profile_of_chunks(image)
        if not isinstance(given, bytes):
            return None
        profile = ImageCms.getOpenProfile(io.BytesIO(given))
        space = profile.profile.xcolor_space.strip()
        if _own_mode(image) not in _MODES.get(space, ()):
            # as viewers do
            return None
        mode = _INPUTS[space]
        transform = ImageCms.buildTransform(profile, _srgb(), mode, "RGB")
        if space != "CMYK" and _changes_nothing(transform, mode):
            return None
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError, ArithmeticError):
        # a damaged profile changes no pixel
        return None

    def convert(rows: Image.Image) -> Image.Image:
        found = ImageCms.applyTransform(
            rows if rows.mode == mode else rows.convert(mode), transform
        )
        assert found is not None, "it is not in place"
        return found

    return convert


def _own_mode(image: Image.Image) -> str:
    return "LA" if image.info.get(IS_GREY) else image.mode


def _profile_of_chunks(image: Image.Image) -> bytes | None:
    """Return a profile that says what a PNG's gAMA and cHRM do; None where it has neither.

    As of the PNG specification, a profile and sRGB come before these.
    """
    info = image.info
    gamma, places = info.get("gamma"), info.get("chromaticity")
    if image.format != "PNG" or "srgb" in info or (gamma is None and places is None):
        return None
    gamma = _USUAL_GAMMA if gamma is None else float(gamma)
    places = _SRGB_PLACES if places is None else tuple(map(float, places))
    is_usual = abs(gamma - _USUAL_GAMMA) < _NEAR and np.allclose(places, _SRGB_PLACES, atol=_NEAR)
    if is_usual or not 1 / 255 < 1 / gamma < 255 or min(places[1::2]) <= 0:
        return None
    space = "GRAY" if _own_mode(image) in _MODES["GRAY"] else "RGB"
    curve = b"curv" + bytes(4) + struct.pack(">IHxx", 1, round(256 / gamma))
    tags = {b"wtpt": _xyz(_D50)}
    if space == "GRAY":
        tags[b"kTRC"] = curve
    else:
        for name, column in zip(b"rgb", _matrix(places).T, strict=True):
            tags |= {bytes([name]) + b"XYZ": _xyz(column), bytes([name]) + b"TRC": curve}
    return _icc(space, tags)


def _matrix(places: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Return the XYZ of red, green and blue at the white of profiles, [3, 3].

    Args:
        places: x and y of white, red, green and blue.
    """
    whole = np.array([[x / y, 1.0, (1 - x - y) / y] for x, y in np.reshape(places, (4, 2))])
    white, colours = whole[0], whole[1:].T
    scaled = colours * np.linalg.solve(colours, white)
    cones = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
    found: npt.NDArray[np.float64] = np.linalg.solve(_BRADFORD, cones @ _BRADFORD) @ scaled
    return found


def _xyz(values: npt.ArrayLike) -> bytes:
    return b"XYZ " + bytes(4) + (np.asarray(values) * 65536).round().astype(">i4").tobytes()


def _icc(space: str, tags: dict[bytes, bytes]) -> bytes:
    """Return a profile of a display, version 2, with a description that says nothing."""
    tags = {**tags, b"desc": b"desc" + bytes(4) + struct.pack(">I", 2) + b"-\0" + bytes(78)}
    table, body, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data
    head = struct.pack(">I4xI", start + len(body), 0x02400000) + b"mntr" + space.encode().ljust(4)
    head += b"XYZ " + struct.pack(">6H", 2000, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    return (head + _xyz(_D50)[8:]).ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


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
