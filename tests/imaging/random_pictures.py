"""Pictures as cameras, editors and programs write them, drawn at random, and how viewers show them.

What a picture shows is worked out here by the formats' specifications: of PNGs from the samples
that were written (PNG 3rd edition: 12.5 sample depth, 11.3 transparency, colour and gamma), of
others from Pillow's decoder, with littlecms for colour profiles.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pillow_heif
from PIL import Image, ImageCms, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.imaging.hostile import animation, photo_of_a_phone, png_of, vast_png
from tests.imaging.pictures import file_of
from tests.imaging.test_colours import (
    P3_PLACES,
    SRGB,
    SRGB_PLACES,
    as_srgb,
    grey,
    profile_of,
    wide,
)

Levels = npt.NDArray[np.float64]
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_KINDS = {0: "grey", 2: "colour", 3: "palette", 4: "grey+alpha", 6: "colour+alpha"}
_GAMMAS = (0.4, 0.5, 0.6, 0.7)
# of Adam7: where each pass begins, and its steps, down and across
_PASSES = (
    *((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4)),
    *((2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A file, and what it shows.

    Attributes:
        kind: for counts.
        seen: ``[H, W, 4]``, levels of sRGB and alpha from 0 to 255; None for one to be refused.
        tolerance: levels by which a decoder may differ.
        has_alpha: whether it can be a mask.
    """

    kind: str
    data: bytes
    seen: Levels | None
    tolerance: float = 0.0
    has_alpha: bool = False


def picture(seed: int) -> Picture:
    """Return the picture of a seed."""
    numbers = random.Random(seed)
    draw = numbers.choices([png, photo, refused], [60, 38, 2])[0]
    return draw(numbers)


def size_of(numbers: random.Random) -> tuple[int, int]:
    """Return height and width: mostly some tens of pixels, at times a line or a point."""
    usual = numbers.choices(range(17, 120), k=6)
    height, width = (numbers.choice([1, numbers.randint(2, 16), *usual]) for _ in range(2))
    return height, width


def samples_of(numbers: random.Random, shape: tuple[int, ...], top: int) -> npt.NDArray[np.int64]:
    """Return smooth shades, noise and flat parts, from 0 to ``top``."""
    noise = np.random.default_rng(numbers.randrange(1 << 30))
    height, width = shape[:2]
    rows, columns = np.mgrid[:height, :width]
    shade = (rows[..., None] * noise.integers(1, 9, shape[2]) + columns[..., None] * 3) / 200
    found = (np.sin(shade * noise.uniform(0.5, 4)) + 1) / 2 * top
    found[: height // 3] = noise.integers(0, top + 1, (height // 3, width, shape[2]))
    found[height // 2 : height // 2 + 3] = noise.integers(0, 2) * top
    return found.round().astype(np.int64)


def png(numbers: random.Random) -> Picture:
    """A PNG of any colour type, depth, interlacing, transparency and colour space."""
    colour = numbers.choice([0, 2, 3, 4, 6])
    depth = numbers.choice(_DEPTHS[colour])
    height, width = size_of(numbers)
    top = 2**depth - 1
    colours = numbers.randint(1, min(top, 255) + 1)
    palette = np.frombuffer(numbers.randbytes(3 * colours), np.uint8).reshape(-1, 3)
    samples = samples_of(
        numbers, (height, width, _CHANNELS[colour]), len(palette) - 1 if colour == 3 else top
    )
    before: list[tuple[bytes, bytes]] = []
    after: list[tuple[bytes, bytes]] = []
    alpha = np.full((height, width), 255.0)
    has_alpha = colour in (4, 6)
    if colour == 3:
        shown = palette[samples[..., 0]].astype(float)
        after.append((b"PLTE", palette.tobytes()))
    else:
        # of deep samples of several channels Pillow takes the upper halves, less than one level off
        eight = samples >> 8 if depth == 16 and colour else samples * 255 / top
        shown = eight[..., : 3 if colour in (2, 6) else 1].astype(float).round()
    if has_alpha:
        alpha = eight[..., -1].astype(float)
    elif numbers.random() < 0.4:
        has_alpha = True
        if colour == 3:
            levels = np.frombuffer(numbers.randbytes(numbers.randint(1, len(palette))), np.uint8)
            after.append((b"tRNS", levels.tobytes()))
            alpha = np.append(levels, [255] * len(palette))[samples[..., 0]].astype(float)
        else:
            hidden = samples[numbers.randrange(height), numbers.randrange(width)]
            after.append((b"tRNS", hidden.astype(">u2").tobytes()))
            # of deep colours Pillow sees the upper halves alone
            step = 256 if (colour, depth) == (2, 16) else 1
            alpha = np.where((samples // step == hidden // step).all(axis=-1), 0.0, 255.0)
    is_grey = colour in (0, 4)
    seen, tolerance = _coloured(numbers, shown, is_grey, before)
    orientation = _chunks(numbers, before, after)
    rows = _rows(samples, depth, numbers.random() < 0.3, numbers)
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, rows[1])
    chunks = [(b"IHDR", head), *before, *after, (b"IDAT", zlib.compress(rows[0])), (b"IEND", b"")]
    whole = np.dstack([np.broadcast_to(seen, (height, width, 3)), alpha])
    return Picture(
        f"PNG {_KINDS[colour]} {depth}",
        png_of(chunks),
        turned(whole, orientation),
        tolerance,
        has_alpha,
    )


def _coloured(
    numbers: random.Random, shown: Levels, is_grey: bool, before: list[tuple[bytes, bytes]]
) -> tuple[Levels, float]:
    """Add chunks of a colour space; return what is seen in it, and the tolerance of that."""
    kind = numbers.choice(["", "", "", "icc", "srgb", "gamma", "places", "usual", "wrong"])
    if kind in ("icc", "wrong"):
        # one of grey is not for colours, nor one of colours for grey
        profile = grey() if is_grey == (kind == "icc") else wide()
        before.append((b"iCCP", b"p\0\0" + zlib.compress(profile)))
        # goes before others
        before.append((b"gAMA", struct.pack(">I", 100_000)))
        if kind == "wrong":
            return shown, 0.0
        return by_littlecms(shown, profile), 1.0
    if kind == "srgb":
        before += [(b"sRGB", b"\0"), (b"gAMA", struct.pack(">I", 70_000))]
    if kind == "usual":
        before.append((b"gAMA", struct.pack(">I", 45_455)))
        before.append((b"cHRM", struct.pack(">8I", *(round(one * 1e5) for one in SRGB_PLACES))))
    if kind in ("gamma", "places"):
        gamma, places = numbers.choice(_GAMMAS), SRGB_PLACES
        before.append((b"gAMA", struct.pack(">I", round(gamma * 1e5))))
        if kind == "places":
            places = P3_PLACES
            before.append((b"cHRM", struct.pack(">8I", *(round(one * 1e5) for one in places))))
        light = (shown / 255) ** (1 / gamma)
        if not is_grey:
            light = light @ (np.linalg.inv(_to_xyz(SRGB_PLACES)) @ _to_xyz(places)).T
        return as_srgb(light), 3.0
    return shown, 0.0


def _to_xyz(places: tuple[float, ...]) -> Levels:
    points = np.array([[x / y, 1, (1 - x - y) / y] for x, y in np.reshape(places, (4, 2))])
    found: Levels = points[1:].T * np.linalg.solve(points[1:].T, points[0])
    return found


def by_littlecms(shown: Levels, profile: bytes) -> Levels:
    pixels = shown.round().astype(np.uint8)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    return _converted(image, profile)


def _converted(image: Image.Image, profile: bytes) -> Levels:
    given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    srgb = ImageCms.createProfile("sRGB")
    found = ImageCms.profileToProfile(image, given, srgb, outputMode="RGB")
    return np.asarray(found).astype(float)


def _chunks(
    numbers: random.Random, before: list[tuple[bytes, bytes]], after: list[tuple[bytes, bytes]]
) -> int:
    """Add metadata of every sort and size before and after the palette; return an orientation."""
    text = bytes(numbers.choices(b"abc <>{}\n", k=numbers.choice([1, 80, 3000])))
    if numbers.random() < 0.02:
        text *= 200_000 // len(text)
    before += numbers.sample(
        [
            (b"tEXt", b"Comment\0" + text),
            (b"zTXt", b"parameters\0\0" + zlib.compress(text)),
            (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + text),
            (b"tIME", struct.pack(">H5B", 2026, 1, 2, 3, 4, 5)),
            (b"prVt", text),
        ],
        numbers.randint(0, 4),
    )
    after += numbers.sample(
        [(b"pHYs", struct.pack(">IIB", 2835, 2835, 1)), (b"oFFs", bytes(9)), (b"iTXt", b"broken")],
        numbers.randint(0, 2),
    )
    orientation = numbers.choice([1, 1, *range(1, 9), 0, 9])
    if orientation != 1 or numbers.random() < 0.3:
        after.append((b"eXIf", exif(numbers, orientation)[6:]))
    return orientation


def _rows(
    samples: npt.NDArray[np.int64], depth: int, is_interlaced: bool, numbers: random.Random
) -> tuple[bytes, bool]:
    passes = _PASSES if is_interlaced else ((0, 0, 1, 1),)
    found = b""
    for top, left, down, across in passes:
        part = samples[top::down, left::across]
        if part.size == 0:
            continue
        flat = part.reshape(len(part), -1)
        bits = (flat[..., None] >> np.arange(depth)[::-1]) & 1
        packed = np.packbits(bits.reshape(len(part), -1).astype(np.uint8), axis=1)
        step = max(1, depth * samples.shape[-1] // 8)
        above = np.zeros(packed.shape[1], np.uint8)
        for row in packed:
            # none, of the left, of above
            kind = numbers.randrange(3)
            shifted = np.concatenate([np.zeros(step, np.uint8), row])[: len(row)]
            other = (np.zeros_like(row), shifted, above)[kind]
            found += bytes([kind]) + (row - other).tobytes()
            above = row
    return found, is_interlaced


def photo(numbers: random.Random) -> Picture:
    """A JPEG, WebP, AVIF or HEIC, by their usual encoders."""
    if numbers.random() < 0.05:
        return deep_photo(numbers)
    kind = numbers.choice(["JPEG", "JPEG", "WEBP", "AVIF", "HEIF"])
    modes = {"JPEG": ["RGB", "RGB", "L", "CMYK"], "HEIF": ["RGB", "RGBA", "L"]}
    mode = numbers.choice(modes.get(kind, ["RGB", "RGBA"]))
    height, width = size_of(numbers)
    if kind == "HEIF":
        # its encoder's least
        height, width = max(height, 16), max(width, 16)
    channels = {"L": 1, "CMYK": 4}.get(mode, len(mode))
    pixels = samples_of(numbers, (height, width, channels), 255).astype(np.uint8)
    image = Image.frombytes(mode, (width, height), pixels.tobytes())
    profile = numbers.choice([None, None, SRGB, "own", "other", b"no profile" * 20])
    if isinstance(profile, str):
        own = {"L": grey(), "CMYK": inks()}.get(mode, wide())
        profile = own if profile == "own" else (grey() if mode != "L" else wide())
    options: dict[str, Any] = {"quality": numbers.randint(30, 100)}
    if profile is not None:
        options["icc_profile"] = profile
    if numbers.random() < 0.7:
        options["exif"] = exif(numbers, numbers.choice([*range(1, 9), 0, 9]))
    if kind == "JPEG":
        options["progressive"] = numbers.random() < 0.3
        options["comment"] = bytes(numbers.choice([0, 10, 60_000]))
    if kind == "WEBP":
        options["lossless"] = numbers.random() < 0.5
    if kind in ("WEBP", "AVIF", "JPEG"):
        options["xmp"] = b"<x:xmpmeta>" + bytes(numbers.choice([0, 500])) + b"</x:xmpmeta>"
    data = file_of(image, kind, **options)
    if numbers.random() < 0.1:
        # as some cameras do
        data += numbers.randbytes(numbers.choice([1, 1000])) if kind == "JPEG" else b""
    seen, more = _decoded(data)
    # encoders leave out transparency where there is none
    has_alpha = mode == "RGBA" and bool((seen[..., 3] < 255).any())
    return Picture(f"{kind} {mode}", data, seen, more, has_alpha)


def deep_photo(numbers: random.Random) -> Picture:
    """A HEIC of 10 bits, as phones make them."""
    samples = samples_of(numbers, (numbers.randint(16, 90), numbers.randint(16, 90), 3), 65535)
    buffer, (height, width, _) = io.BytesIO(), samples.shape
    deep = samples.astype("<u2").tobytes()
    pillow_heif.encode("RGB;16", (width, height), deep, buffer, quality=numbers.randint(30, 100))
    return Picture("HEIF 10", buffer.getvalue(), _decoded(buffer.getvalue())[0])


def _decoded(data: bytes) -> tuple[Levels, float]:
    """Return what Pillow and littlecms make of a file."""
    image = Image.open(io.BytesIO(data))
    image.load()
    has_alpha = "A" in image.getbands()
    alpha = np.asarray(image.getchannel("A")) if has_alpha else np.full(image.size[::-1], 255)
    plain = image.convert("RGB") if image.mode not in ("L", "CMYK") else image
    seen, more = np.asarray(plain.convert("RGB")).astype(float), 0.0
    profile = image.info.get("icc_profile")
    spaces = {"L": b"GRAY", "CMYK": b"CMYK"}
    if profile and profile[16:20] == spaces.get(plain.mode, b"RGB "):
        seen, more = _converted(plain, profile), 1.0
    whole = Image.fromarray(np.dstack([seen, alpha]).round().astype(np.uint8))
    whole.info["exif"] = image.info.get("exif")
    if not whole.info["exif"]:
        return np.asarray(whole).astype(float), more
    return np.asarray(ImageOps.exif_transpose(whole)).astype(float), more


def refused(numbers: random.Random) -> Picture:
    """A file of another format, of several frames, or no picture at all."""
    image = Image.fromarray(samples_of(numbers, (24, 40, 3), 255).astype(np.uint8))
    kind = numbers.choice(["GIF", "TIFF", "BMP", "PPM", "frames", "phone", "text", "cut", "vast"])
    if kind == "phone":
        data = photo_of_a_phone()
        return Picture("MPO", data, _decoded(data)[0])
    texts = PngInfo()
    texts.add_text("a", "b" * 100)
    data = {
        "frames": lambda: animation(numbers.choice(["PNG", "WEBP"])),
        "vast": lambda: vast_png(9_500, depth=1, colour=0),
        "text": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "cut": lambda: file_of(image, pnginfo=texts)[:900],
    }.get(kind, lambda: file_of(image, kind))()
    return Picture(f"no picture: {kind}", data, None)


def exif(numbers: random.Random, orientation: int) -> bytes:
    """Return EXIF data with an orientation among other tags."""
    found = Image.Exif()
    for tag in numbers.sample([0x010F, 0x0110, 0x0131, 0x8298, 0x9286], numbers.randint(0, 4)):
        found[tag] = "x" * numbers.choice([1, 30, 2000])
    found[0x0112] = orientation
    return found.tobytes()


def inks() -> bytes:
    """Return a profile of a printer: a table of two levels of each ink, in Lab (ICC.1 10.11)."""
    grid = np.stack(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    cyan, magenta, yellow, black = grid.T
    light = 95 - 35 * cyan - 45 * magenta - 8 * yellow - 80 * black
    lab = np.stack(
        [
            light.clip(3) * 2.55,
            128 - 30 * cyan + 65 * magenta - 5 * yellow,
            128 - 40 * cyan - 3 * magenta + 85 * yellow,
        ],
        axis=-1,
    )
    ramp = bytes(range(256))
    body = b"mft1" + bytes(4) + bytes([4, 3, 2, 0])
    body += (np.eye(3) * 65536).astype(">i4").tobytes()
    body += ramp * 4 + lab.round().clip(0, 255).astype(np.uint8).tobytes() + ramp * 3
    white = b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061)
    return profile_of(b"prtrCMYKLab ", {b"A2B0": body, b"wtpt": white})


def turned(pixels: Levels, orientation: int) -> Levels:
    """Return pixels as an orientation of EXIF has them seen."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    # what remains after that: mirrored across, down
    across, down = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    return pixels[:: -1 if down else 1, :: -1 if across else 1]
