"""From the bytes of an image that a client sends to its pixels; nothing in them is trusted.

What can be told from the header is checked before a pixel is decoded. Whoever needs no more than
one look at the pixels takes them in strips, which costs less memory than another copy of them.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image, PngImagePlugin, UnidentifiedImageError

from ray_cluster.errors import MODEL_ERRORS, InvalidRequest
from ray_cluster.imaging.colours import IS_GREY, Convert, to_srgb

try:
    import pillow_heif
except ImportError:
    HAS_HEIC = False
else:
    HAS_HEIC = True
    pillow_heif.register_heif_opener(
        decode_threads=1, thumbnails=False, depth_images=False, aux_images=False
    )
# what a decoder's threads take is bounded with all else
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

KINDS = "PNG, JPEG, WebP" + (", AVIF or HEIC" if HAS_HEIC else " or AVIF")
"""Files that are decoded, in words; HEIC with the extra ``heic`` alone."""

_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", *["HEIF"] * HAS_HEIC)
# photos of phones: several views of one scene, of which the first is the photo
_SEVERAL_VIEWS = ("MPO", "HEIF")
# what a resize takes grows with the longer side, whatever the pixels; no JPEG has a longer one
MAX_SIDE_PX = 65_535
# programs write 20 at most; each costs the decoder a pass over all pixels, for 10 bytes of the file
MAX_JPEG_SCANS = 32
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
# those that swap width and height
_LYING = (5, 6, 7, 8)
# the last 0xff before it: a run of them would cost the square of its length
_MARKER_WITH_LENGTH_OR_END = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_STRIP_PIXELS = 1 << 20
# of a PNG, in its first chunk, before the kind of its colours
_PNG_DEPTH_AT, _GREY_WITH_ALPHA = 24, 4
# measured displays have profiles above Pillow's 1 MiB, and some programs write a whole workflow
PngImagePlugin.MAX_TEXT_CHUNK = 8 << 20


class Header(NamedTuple):
    """What the first bytes of a file say.

    Attributes:
        kind: PNG, JPEG, MPO, WEBP, AVIF or HEIF; nothing for a file that cannot be read.
    """

    kind: str = ""
    width_px: int = 0
    height_px: int = 0

    @property
    def num_pixels(self) -> int:
        """Of the image; 0 for a file that cannot be read."""
        return self.width_px * self.height_px


def header_of(data: bytes) -> Header:
    """Return what a file seems to be; next to nothing of it is checked."""
    if (webp := _webp_header(data)) is not None:
        return webp
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                return Header(image.format or "", *image.size)
    except Image.DecompressionBombError:
        return Header()
    except _DAMAGED:
        return Header()


def _webp_header(data: bytes) -> Header | None:
    """Return what a WebP seems to be: opened by Pillow, it has memory for its pixels already."""
    head = data[:30].ljust(30, b"\0")
    number = int.from_bytes(head[21:25], "little")
    match head[:4], head[8:16]:
        case b"RIFF", b"WEBPVP8X":
            sides = (int.from_bytes(head[start : start + 3], "little") + 1 for start in (24, 27))
        case b"RIFF", b"WEBPVP8L":
            sides = ((number >> shift) % (1 << 14) + 1 for shift in (0, 14))
        case b"RIFF", b"WEBPVP8 ":
            sides = (int.from_bytes(head[at : at + 2], "little") % (1 << 14) for at in (26, 28))
        case _:
            return None
    return Header("WEBP", *sides)


def decoded(data: bytes, param: str, max_pixels: int | None = None) -> Image.Image:
    """Return an image as it is seen: RGB, or RGBA if the file has transparency, in sRGB.

    Deeper colours become 8 bits; its colour profile and its EXIF orientation are applied.

    Args:
        param: what the image is called in errors.
        max_pixels: None for an image that has passed this check.

    Raises:
        InvalidRequest: as of :func:`opened`.
    """
    with opened(data, param, max_pixels) as image:
        image.load()
        mode, convert = _mode_of(image), to_srgb(image)
        is_plain = image.mode == mode and convert is None
        parts = strips(image, convert)
        return upright(image if is_plain else joined(parts, mode, image.size), image)


@contextmanager
def opened(data: bytes, param: str, max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Open an image whose header is in order; its pixels are still to be decoded.

    Args:
        param, max_pixels: as of :func:`decoded`.

    Raises:
        InvalidRequest: names ``param``; no file of :data:`KINDS` that can be decoded whole, more
            pixels than allowed, too long a side, several frames, or too many scans; also for what
            decoding raises in the block.
    """
    try:
        with warnings.catch_warnings():
            # of damaged metadata, which changes no pixel, and of sizes, which are checked here
            warnings.simplefilter("ignore")
            if (webp := _webp_header(data)) is not None:
                _check_size(webp.width_px, webp.height_px, param, max_pixels)
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_size(*image.size, param, max_pixels)
                _check_kind(image, data, param)
                _note_png(image, data)
                yield image
    except Image.DecompressionBombError as error:
        raise _too_large(param, "far too many", max_pixels) from error
    except UnidentifiedImageError as error:
        raise not_decodable(param, "it is of another kind, or damaged at its start") from error
    except MemoryError as error:
        reason = "decoding it takes more memory than an image of its size may"
        raise not_decodable(param, reason) from error
    except _DAMAGED as error:
        # one line, whatever the file made of it
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise not_decodable(param, reason) from error


def not_decodable(param: str, reason: str) -> InvalidRequest:
    """Return the error of an image that cannot be decoded."""
    return InvalidRequest(
        f"{param!r} cannot be decoded: {reason}. It must be a whole {KINDS} image; save it again "
        "as one of these.",
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


def upright(pixels: Image.Image, image: Image.Image) -> Image.Image:
    """Return the pixels of an image, all or some of their channels, turned as it is seen."""
    turn = _TURNS.get(_orientation(image))
    return pixels if turn is None else pixels.transpose(turn)


def upright_size(size_px: tuple[int, int], image: Image.Image) -> tuple[int, int]:
    """Return the width and height of a decoded image, of this size in its file, as it is seen."""
    width, height = size_px
    return (height, width) if _orientation(image) in _LYING else size_px


def strips(image: Image.Image, convert: Convert | None = None) -> Iterator[Image.Image]:
    """Yield the rows of a decoded image, some at a time, as RGB or RGBA; they are not turned.

    Args:
        convert: takes their colours to sRGB.
    """
    mode, num_rows = _mode_of(image), max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        bottom = min(image.height, top + num_rows)
        rows = image.crop((0, top, image.width, bottom))
        plain = _of_eight_bits(rows, mode)
        if convert is not None:
            # four inks have no way to RGB but by their profile
            seen = convert(rows if rows.mode == "CMYK" else plain.convert("RGB"))
            if mode == "RGBA":
                seen.putalpha(plain.getchannel("A"))
            plain = seen
        yield plain


def joined(parts: Iterator[Image.Image], mode: str, size_px: tuple[int, int]) -> Image.Image:
    """Return the image of these strips."""
    whole, top = Image.new(mode, size_px), 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


def _check_size(width_px: int, height_px: int, param: str, max_pixels: int | None) -> None:
    num_pixels = width_px * height_px
    if num_pixels == 0:
        raise ValueError("it has no pixels")
    if max(width_px, height_px) > MAX_SIDE_PX:
        raise InvalidRequest(
            f"{param!r} is {width_px}x{height_px}; at most {MAX_SIDE_PX} px a side are allowed. "
            "Send a smaller image.",
            param,
            "invalid_image",
        )
    if max_pixels is not None and num_pixels > max_pixels:
        raise _too_large(param, f"{width_px}x{height_px} = {num_pixels}", max_pixels)


def _check_kind(image: Image.Image, data: bytes, param: str) -> None:
    if image.format not in _SEVERAL_VIEWS and getattr(image, "is_animated", False):
        raise InvalidRequest(
            f"{param!r} is an animation; only images of one frame are edited. Send one frame.",
            param,
            "invalid_image",
        )
    if image.format in ("JPEG", "MPO"):
        _check_scans(data)


def _note_png(image: Image.Image, data: bytes) -> None:
    """Scale the one level or colour of a PNG that is transparent, as Pillow scales the pixels.

    And note what has no colours: with deep transparency, Pillow makes them of its grey.
    """
    given = image.info.get("transparency")
    if image.format != "PNG" or len(data) <= _PNG_DEPTH_AT + 1:
        return
    bits, kind = data[_PNG_DEPTH_AT : _PNG_DEPTH_AT + 2]
    image.info[IS_GREY] = kind == _GREY_WITH_ALPHA
    if image.mode == "L" and isinstance(given, int) and bits in (2, 4):
        top = 2**bits - 1
        image.info["transparency"] = (given & top) * 255 // top
    elif image.mode == "RGB" and isinstance(given, tuple) and bits == 16:
        image.info["transparency"] = tuple(one >> 8 for one in given)


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
        if num_scans > MAX_JPEG_SCANS:
            raise ValueError(f"it has more than the {MAX_JPEG_SCANS} progressive scans allowed")
        position = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except _DAMAGED:
        # viewers show such an image as it is
        return 1
    return orientation if isinstance(orientation, int) else 1


def _mode_of(image: Image.Image) -> str:
    """Return RGB, or RGBA if an image has transparency."""
    if image.mode == "P" and image.palette is None:
        raise ValueError("it lacks its palette")
    return "RGBA" if image.has_transparency_data else "RGB"


def _of_eight_bits(strip: Image.Image, mode: str) -> Image.Image:
    if strip.mode.startswith("I"):
        return _of_sixteen_bits(strip)
    return strip if strip.mode == mode else strip.convert(mode)


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
