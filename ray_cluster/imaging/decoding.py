"""From the bytes of an image that a client sends to its pixels; nothing in them is trusted.

What can be told from the header is checked before a pixel is decoded.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from ray_cluster.errors import MODEL_ERRORS, InvalidRequest

_FORMATS = ("PNG", "JPEG", "WEBP")
# photos of phones: several views of one scene, of which the first is the photo
_SEVERAL_VIEWS = "MPO"
# programs write 20 at most; each costs the decoder a pass over all pixels, for 10 bytes of the file
_MAX_JPEG_SCANS = 100
# what Pillow raises for damaged files; its bomb error is an Exception of no other kind
_DAMAGED: tuple[type[Exception], ...] = (
    *MODEL_ERRORS,
    EOFError,
    SyntaxError,
    struct.error,
    zlib.error,
)
# by EXIF orientation; 1 is upright
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MARKER_WITH_LENGTH_OR_END = re.compile(rb"\xff+([^\x00\x01\xd0-\xd8\xff])")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


def decoded(data: bytes, param: str, max_pixels: int | None = None) -> Image.Image:
    """Return an image as it is seen: RGB, or RGBA if the file has transparency.

    Deeper colours become 8 bits; its EXIF orientation is applied.

    Args:
        param: what the image is called in errors.
        max_pixels: None for an image that has passed this check.

    Raises:
        InvalidRequest: names ``param``; no PNG, JPEG or WebP that can be decoded whole, more pixels
            than allowed, or several frames.
    """
    try:
        with warnings.catch_warnings():
            # of damaged metadata, which changes no pixel, and of sizes, which are checked here
            warnings.simplefilter("ignore")
            return _decoded(data, param, max_pixels)
    except Image.DecompressionBombError as error:
        raise _too_large(param, "far too many", max_pixels) from error
    except UnidentifiedImageError as error:
        raise not_decodable(param, "it is of another kind, or damaged at its start") from error
    except _DAMAGED as error:
        # one line, whatever the file made of it
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise not_decodable(param, reason) from error


def not_decodable(param: str, reason: str) -> InvalidRequest:
    """Return the error of an image that cannot be decoded."""
    return InvalidRequest(
        f"{param!r} cannot be decoded: {reason}. It must be a whole PNG, JPEG or WebP image; save "
        "it again as one of these.",
        param,
        "invalid_image",
    )


def on_white(image: Image.Image) -> Image.Image:
    """Return an image without transparency, as it looks on white."""
    if image.mode != "RGBA":
        return image
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _decoded(data: bytes, param: str, max_pixels: int | None) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        num_pixels = image.width * image.height
        if num_pixels == 0:
            raise ValueError("it has no pixels")
        if max_pixels is not None and num_pixels > max_pixels:
            raise _too_large(param, f"{image.width}x{image.height} = {num_pixels}", max_pixels)
        if image.format != _SEVERAL_VIEWS and getattr(image, "is_animated", False):
            raise InvalidRequest(
                f"{param!r} is an animation; only images of one frame are edited. Send one frame.",
                param,
                "invalid_image",
            )
        if image.format in ("JPEG", _SEVERAL_VIEWS):
            _check_scans(data)
        image.load()
        turn = _TURNS.get(_orientation(image))
        plain = _of_eight_bits(image)
    return plain if turn is None else plain.transpose(turn)


def _too_large(param: str, given: str, max_pixels: int | None) -> InvalidRequest:
    allowed = "" if max_pixels is None else f"; at most {max_pixels} are allowed"
    return InvalidRequest(
        f"{param!r} has {given} pixels{allowed}. Send a smaller image.", param, "invalid_image"
    )


def _check_scans(jpeg: bytes) -> None:
    """Raise ValueError for a JPEG of so many scans that decoding it could take hours."""
    num_scans, position = 0, 2
    # segments of marker, length and content; between them coded pixels, where 0xff is masked
    while marker := _MARKER_WITH_LENGTH_OR_END.search(jpeg, position):
        kind = marker[1][0]
        if kind == _END_OF_IMAGE:
            return
        num_scans += kind == _START_OF_SCAN
        if num_scans > _MAX_JPEG_SCANS:
            raise ValueError(f"it has more than {_MAX_JPEG_SCANS} progressive scans")
        position = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except _DAMAGED:
        # viewers show such an image as it is
        return 1
    return orientation if isinstance(orientation, int) else 1


def _of_eight_bits(image: Image.Image) -> Image.Image:
    """Return an image as RGB, or as RGBA if it has transparency."""
    if image.mode.startswith("I"):
        return _of_sixteen_bits(image)
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _of_sixteen_bits(image: Image.Image) -> Image.Image:
    """Return grey of 16 bits, which Pillow would clip, in 8."""
    deep = np.asarray(image).astype(np.uint32)
    # rounded, and white stays white: 65535 = 255 * 257
    grey = Image.fromarray(((deep + 128) // 257).astype(np.uint8)).convert("RGB")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        opaque = np.where(deep == transparent, 0, 255).astype(np.uint8)
        grey.putalpha(Image.fromarray(opaque))
    return grey
