"""Colour profiles are honoured as viewers do, and transparency and metadata of odd PNGs read."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.decoding import decoded
from tests.imaging.pictures import exif_of, file_of, gradient

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# of Display P3, chromatically adapted
P3 = {
    b"rXYZ": (0.51512, 0.2412, -0.00105),
    b"gXYZ": (0.29198, 0.69225, 0.04189),
    b"bXYZ": (0.1571, 0.06657, 0.78407),
}


def wide() -> bytes:
    """Return the profile of Display P3: sRGB's curve with other primaries."""
    profile = bytearray(SRGB)
    for number in range(struct.unpack(">I", profile[128:132])[0]):
        tag, start = struct.unpack(">4sI", profile[132 + 12 * number : 140 + 12 * number])
        if tag in P3:
            words = b"".join(struct.pack(">i", round(one * 65536)) for one in P3[tag])
            profile[start + 8 : start + 20] = words
    return bytes(profile)


def grey() -> bytes:
    """Return a profile of grey with a gamma of 1.0."""
    curve = b"curv" + bytes(8)
    white = b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061)
    return profile_of(b"mntrGRAYXYZ ", {b"kTRC": curve, b"wtpt": white})


def profile_of(kind: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return a profile of version 2: what it is of, its colours and the space they lead to."""
    tags = tags | {b"desc": b"desc" + bytes(4) + struct.pack(">I", 2) + b"g\0" + bytes(78)}
    table, body, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I4xI", start + len(body), 0x02400000) + kind
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    head += struct.pack(">3i", 63190, 65536, 54061) + bytes(48)
    return head + struct.pack(">I", len(tags)) + table + body


def seen(image: Image.Image, profile: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return an image as littlecms shows it, by Pillow's own call."""
    given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    found = ImageCms.profileToProfile(
        image, given, ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert found is not None
    return np.asarray(found).astype(int)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_a_wide_profile_is_brought_to_srgb(
    kind: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # and some rows at a time
    monkeypatch.setattr("ray_cluster.imaging.decoding._STRIP_PIXELS", 100)
    picture = Image.fromarray(gradient())
    found = decoded(file_of(picture, kind, icc_profile=wide(), **options), "image")
    assert (found.mode, found.size) == ("RGB", picture.size)
    assert np.array_equal(np.asarray(found), seen(picture, wide()))
    assert np.abs(np.asarray(found).astype(int) - gradient()).max() > 10
    turned = decoded(file_of(picture, icc_profile=wide(), exif=exif_of(6)), "image")
    assert turned.size == picture.size[::-1]


def test_a_photos_profile_is_applied_to_what_its_jpeg_holds() -> None:
    data = file_of(gradient(), "JPEG", quality=95, icc_profile=wide())
    plain = Image.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(np.asarray(decoded(data, "image")), seen(plain, wide()))


def test_transparency_stays_and_palettes_are_brought_too() -> None:
    alpha = np.tile(np.arange(40, dtype=np.uint8) * 6, (24, 1))
    picture = Image.fromarray(np.dstack([gradient(), alpha]))
    found = np.asarray(decoded(file_of(picture, icc_profile=wide()), "image"))
    assert np.array_equal(found[..., 3], alpha)
    assert np.array_equal(found[..., :3], seen(picture.convert("RGB"), wide()))
    painted = Image.fromarray(gradient()).quantize(16)
    found = np.asarray(decoded(file_of(painted, icc_profile=wide()), "image"))
    assert np.array_equal(found, seen(painted.convert("RGB"), wide()))


def test_grey_has_a_profile_of_its_own() -> None:
    picture = Image.fromarray(gradient()[..., 1])
    found = np.asarray(decoded(file_of(picture, icc_profile=grey()), "image"))
    assert np.array_equal(found, seen(picture, grey()))
    # linear light is brighter than it reads
    assert found[0, 20, 0] > int(gradient()[0, 20, 1]) + 30
    deep = Image.fromarray(np.asarray(picture).astype(np.uint16) * 257)
    assert np.array_equal(np.asarray(decoded(file_of(deep, icc_profile=grey()), "image")), found)
    # of which Pillow makes colours, where it is deep and has transparency
    pairs = np.dstack([gradient()[..., 1], np.full((24, 40), 255, np.uint8)]).astype(">u2") * 257
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pairs))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 24, 16, 4, 0, 0, 0))
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(grey()))
    data = b"\x89PNG\r\n\x1a\n" + head + profile + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    assert np.array_equal(np.asarray(decoded(data, "image"))[..., :3], found)


@pytest.mark.parametrize(
    "profile",
    [SRGB, b"no profile", wide()[:200], bytes(128) + wide()[128:], grey()],
    # not their bytes, which have the second in which each worker made them
    ids=["sRGB", "none", "cut", "no head", "grey"],
)
def test_what_is_srgb_or_no_profile_of_its_kind_changes_no_bit(profile: bytes) -> None:
    found = decoded(file_of(gradient(), icc_profile=profile), "image")
    assert np.array_equal(np.asarray(found), gradient())


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks_of(pixels: npt.NDArray[np.uint8], *chunks: bytes) -> bytes:
    """Return a PNG with chunks before its pixels."""
    data = file_of(pixels)
    at = 8 + 25
    return data[:at] + b"".join(chunks) + data[at:]


def gamma_of(value: float) -> bytes:
    return chunk(b"gAMA", struct.pack(">I", round(value * 100_000)))


def places_of(*places: float) -> bytes:
    return chunk(b"cHRM", struct.pack(">8I", *(round(one * 100_000) for one in places)))


P3_PLACES = (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
SRGB_PLACES = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)


def as_srgb(linear: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return what sRGB holds of linear light (IEC 61966-2-1)."""
    linear = linear.clip(0, 1)
    low, high = 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055
    return 255 * np.where(linear <= 0.0031308, low, high)


def test_the_gamma_of_a_png_is_applied() -> None:
    ramp = np.arange(256, dtype=np.uint8)
    for pixels in (np.tile(ramp, (4, 1)), np.tile(ramp[:, None], (4, 1, 3))):
        found = np.asarray(decoded(chunks_of(pixels, gamma_of(1.0)), "image"))
        # littlecms tells the darkest levels of linear grey apart a little less
        assert np.abs(found[:, 16:, 0] - as_srgb(ramp / 255)[16:]).max() <= 1.5
    # of most programs, and where the file says that it is sRGB
    for chunks in ([gamma_of(0.45455)], [chunk(b"sRGB", b"\0"), gamma_of(1.0)]):
        assert np.array_equal(
            np.asarray(decoded(chunks_of(gradient(), *chunks), "image")), gradient()
        )


def test_the_primaries_of_a_png_are_applied() -> None:
    def to_xyz(places: tuple[float, ...]) -> npt.NDArray[np.float64]:
        points = np.array([[x / y, 1, (1 - x - y) / y] for x, y in np.reshape(places, (4, 2))])
        return points[1:].T * np.linalg.solve(points[1:].T, points[0])

    pixels = gradient()
    found = np.asarray(decoded(chunks_of(pixels, gamma_of(0.5), places_of(*P3_PLACES)), "image"))
    # both have the same white
    matrix = np.linalg.inv(to_xyz(SRGB_PLACES)) @ to_xyz(P3_PLACES)
    wanted = as_srgb(((pixels / 255) ** 2) @ matrix.T)
    assert np.abs(found - wanted).max() <= 2.5
    assert np.abs(found - wanted).mean() < 0.6
    assert np.abs(found - pixels.astype(int)).max() > 10


@pytest.mark.parametrize(
    "chunks",
    [
        [gamma_of(0.0)],
        [gamma_of(40_000.0)],
        [gamma_of(1.0), places_of(*[0.0] * 8)],
        [gamma_of(1.0), places_of(*[0.3] * 8)],
        [places_of(*SRGB_PLACES)],
    ],
)
def test_what_no_colours_have_changes_nothing(chunks: list[bytes]) -> None:
    assert np.array_equal(np.asarray(decoded(chunks_of(gradient(), *chunks), "image")), gradient())


def png(bits: int, kind: int, row: bytes, width: int, transparent: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 4, bits, kind, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress((b"\0" + row) * 4))
    ends = chunk(b"tRNS", transparent) + rows + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + ends


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("is_white", [True, False])
def test_the_transparent_level_of_grey_is_found_at_every_depth(bits: int, is_white: bool) -> None:
    top = 2**bits - 1
    text = "".join(format(one, f"0{bits}b") for one in (top,) * 8 + (0,) * 8)
    row = bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8))
    data = png(bits, 0, row, 16, struct.pack(">H", top if is_white else 0))
    alpha = np.asarray(decoded(data, "mask"))[..., 3]
    assert ((alpha == 0) == (np.arange(16) < 8) ^ (not is_white)).all()


def test_the_transparent_colour_of_deep_colours_is_found() -> None:
    colours = [(0x1234, 0xABCD, 0xFFFF), (0x2234, 0xABCD, 0xFFFF)]
    row = b"".join(struct.pack(">3H", *one) for one in colours)
    found = np.asarray(decoded(png(16, 2, row, 2, struct.pack(">3H", *colours[0])), "image"))
    assert found[0, :, 3].tolist() == [0, 255]
    assert found[0, 1, :3].tolist() == [0x22, 0xAB, 0xFF]


def test_large_profiles_and_texts_are_read_over_and_bombs_are_not() -> None:
    texts = PngInfo()
    texts.add_text("workflow", "x" * 3_000_000, zip=True)
    padded = SRGB + bytes(1_500_000)
    for data in (
        file_of(gradient(), pnginfo=texts),
        file_of(gradient(), icc_profile=padded),
        file_of(gradient(), "JPEG", quality=100, icc_profile=padded),
    ):
        assert decoded(data, "image").size == (40, 24)
    bomb = PngInfo()
    bomb.add_text("workflow", "x" * (9 << 20), zip=True)
    with pytest.raises(InvalidRequest, match="too large"):
        decoded(file_of(gradient(), pnginfo=bomb), "image")
