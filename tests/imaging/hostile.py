"""Files that a client may send in bad faith, or by a broken program; the same for the same seed."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ray_cluster.imaging.processes.image_coder import ImageCoder
from tests.imaging.pictures import exif_of, file_of, gradient

_START_OF_SCAN = b"\xff\xda"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
Chunk = tuple[bytes, bytes]


def peak_bytes(process_id: int) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) << 10


def png_of(chunks: Sequence[Chunk]) -> bytes:
    """Return a png of these chunks, with their right checksums."""
    return _SIGNATURE + b"".join(
        struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data))
        for name, data in chunks
    )


def plain_png(
    width: int, height: int, *, depth: int = 8, colour: int = 2, rows: bytes = b""
) -> list[Chunk]:
    """Return the chunks of a png; the rows as they are before compression."""
    header = struct.pack("!IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]


def vast_png(side: int, *, depth: int = 8, colour: int = 2, more: Sequence[Chunk] = ()) -> bytes:
    """Return a png of side x side black pixels, made by repetition: of 64 megapixels in no time."""
    samples = {0: 1, 2: 3, 3: 1, 6: 4}[colour]
    num_bytes = side * (1 + side * samples * depth // 8)
    block = 1 << 20
    coding = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = coding.compress(bytes(block)) + coding.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    rest = last.compress(bytes(num_bytes % block)) + last.flush()
    # Adler-32 of zeros
    check = struct.pack("!HH", num_bytes % 65521, 1)
    data = b"\x78\x9c" + zeros * (num_bytes // block) + rest + check
    first, _, end = plain_png(side, side, depth=depth, colour=colour)
    return png_of([first, *more, (b"IDAT", data), end])


def vast_scans(side: int, num_scans: int) -> bytes:
    """Return the header and the scans of a progressive jpeg of side x side pixels."""
    data = bytearray(many_scans(num_scans))
    size = data.index(b"\xff\xc2") + 5
    data[size : size + 4] = struct.pack("!HH", side, side)
    return bytes(data)


def animation(kind: str) -> bytes:
    frames = [Image.fromarray(one) for one in (gradient(), 255 - gradient(), gradient())]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def photo_of_a_phone() -> bytes:
    """Return a jpeg with a second view behind it (MPO)."""
    first, second = Image.fromarray(gradient()), Image.fromarray(gradient(20, 12))
    return file_of(first, "MPO", save_all=True, append_images=[second])


def many_scans(num_scans: int) -> bytes:
    """Return a progressive jpeg of so many scans, the last of which is repeated."""
    data = file_of(gradient(), "JPEG", progressive=True)
    last = data.rindex(_START_OF_SCAN)
    more = num_scans - data.count(_START_OF_SCAN)
    return data[:-2] + data[last:-2] * more + data[-2:]


def reader_of(coder: ImageCoder) -> int:
    """Return the id of the process that decodes; it is the only one that has started."""
    coder.image_facts(regular_files()[0], "image", 1 << 20).result(60)
    (process_id,) = coder.process_ids
    return process_id


@cache
def regular_files() -> tuple[bytes, ...]:
    """Return a file of each kind that is decoded, and of some that are not."""
    rgb, deep = Image.fromarray(gradient()), gradient()[..., 0].astype(np.uint16) * 257
    rgba = rgb.copy()
    rgba.putalpha(Image.fromarray(gradient()[..., 1]))
    texts = PngInfo()
    texts.add_itxt("XML:com.adobe.xmp", "<tiff:Orientation>6</tiff:Orientation>")
    palette = rgb.quantize(7)
    colours = gradient().astype(">u2") * 257
    rows = b"".join(b"\0" + row.tobytes() for row in colours)
    return (
        file_of(rgb, pnginfo=texts),
        file_of(rgba),
        file_of(palette, transparency=bytes(range(0, 140, 20))),
        file_of(rgb.convert("L"), transparency=9),
        file_of(rgba.convert("LA")),
        file_of(rgb.convert("1")),
        file_of(Image.fromarray(deep)),
        png_of(plain_png(40, 24, depth=16, rows=rows)),
        file_of(rgb, "JPEG", exif=exif_of(6)),
        file_of(rgb, "JPEG", progressive=True, icc_profile=bytes(5000)),
        file_of(rgb.convert("CMYK"), "JPEG"),
        file_of(rgb.convert("L"), "JPEG"),
        file_of(rgb, "WEBP", exif=exif_of(8)),
        file_of(rgba, "WEBP", lossless=True),
        file_of(rgba, "AVIF", quality=90),
        file_of(rgb, "AVIF", exif=exif_of(6)),
        file_of(rgba, "HEIF", quality=90),
        file_of(rgb.convert("L"), "HEIF"),
        photo_of_a_phone(),
        animation("PNG"),
        animation("WEBP"),
        file_of(rgb, "GIF"),
        file_of(rgb, "TIFF"),
    )


@cache
def bombs() -> tuple[bytes, ...]:
    """Return small files that stand for much: pixels, text, passes over them."""
    text = zlib.compress(bytes(80 << 20), 9)
    first, *rest = plain_png(40, 24, rows=bytes(24 * 121))
    return (
        *(png_of(plain_png(side, side)) for side in (1025, 9_500, 13_500, 60_000, 2**31 - 1)),
        png_of(plain_png(0, 40)),
        png_of([first, (b"zTXt", b"k\0\0" + text), *rest]),
        png_of([first, (b"iCCP", b"k\0\0" + text), *rest]),
        png_of([first, *[(b"tEXt", b"k\0" + bytes(900_000))] * 80, *rest]),
        many_scans(200),
    )


def overfull() -> bytes:
    """Return a png of 40 x 24 pixels that goes on for 80 MiB after them."""
    first, *_, last = plain_png(40, 24)
    return png_of([first, (b"IDAT", zlib.compress(bytes(80 << 20), 9)), last])


def hostile_files(num_files: int, seed: int) -> Iterator[bytes]:
    """Yield regular files, bombs, and regular files after some kind of damage."""
    rng = random.Random(seed)
    regular = regular_files()
    fixed = [*regular, *bombs(), overfull(), b"", *(one[:16] for one in regular)]
    yield from fixed
    for _ in range(num_files - len(fixed)):
        damage = rng.choice(_DAMAGES)
        yield damage(rng.choice(regular), rng)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 5, 20])):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def _flipped_at_the_start(data: bytes, rng: random.Random) -> bytes:
    return data[:12] + _flipped(data[12:120], rng) + data[120:]


def _truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _cut_within(data: bytes, rng: random.Random) -> bytes:
    start, stop = sorted(rng.sample(range(len(data)), 2))
    return data[:start] + data[stop:]


def _repeated_within(data: bytes, rng: random.Random) -> bytes:
    start, stop = sorted(rng.sample(range(len(data)), 2))
    return data[:stop] + data[start:]


def _noise_after_the_start(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([4, 12, 33, 60])] + rng.randbytes(rng.randrange(300))


def _other_chunks(_data: bytes, rng: random.Random) -> bytes:
    """Return a png whose checksums are right, and its values are not."""
    width, height = (rng.choice([1, 7, 40, 1000, 70_000]) for _ in range(2))
    depth, colour = rng.choice([1, 2, 4, 8, 16, 3]), rng.choice([0, 2, 3, 4, 6, 5])
    rows = bytes(rng.randrange(10_000))
    first, *rest = plain_png(width, height, depth=depth, colour=colour, rows=rows)
    names = [b"PLTE", b"tRNS", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"gAMA", b"pHYs", b"iTXt"]
    others = [(rng.choice(names), rng.randbytes(rng.randrange(40))) for _ in range(3)]
    return png_of([first, *others, *rest])


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flipped,
    _flipped_at_the_start,
    _truncated,
    _cut_within,
    _repeated_within,
    _noise_after_the_start,
    _other_chunks,
)
