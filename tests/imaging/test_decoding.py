"""Every kind of file becomes the 8-bit pixels that a viewer shows."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pillow_heif
import pytest
from PIL import Image

from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.decoding import MAX_SIDE_PX, Header, decoded, header_of, on_white
from ray_cluster.imaging.edit_images import ImageFacts, MaskFacts, image_facts, mask_facts
from ray_cluster.imaging.encoder import Pixels
from ray_cluster.policies.edits import Box
from tests.imaging.hostile import (
    animation,
    hostile_files,
    photo_of_a_phone,
    plain_png,
    png_of,
    regular_files,
)
from tests.imaging.pictures import exif_of, file_of, gradient, mask_file

MAX_PIXELS = 1 << 20
# how a viewer shows what is stored, by EXIF orientation
SHOWN: dict[int, Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {
    0: lambda stored: stored,
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
    8: lambda stored: np.rot90(stored, 1),
    9: lambda stored: stored,
}


def seen(data: bytes) -> Pixels:
    return np.array(on_white(decoded(data, "image", MAX_PIXELS)))


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_image_is_turned_as_its_exif_says(orientation: int, kind: str) -> None:
    data = file_of(gradient(), kind, lossless=True, exif=exif_of(orientation))
    shown = SHOWN[orientation](gradient())
    assert np.array_equal(seen(data), shown)
    assert image_facts(data, "image", MAX_PIXELS) == ImageFacts(
        shown.shape[1], shown.shape[0], False
    )


@pytest.mark.parametrize("kind", ["JPEG", "AVIF", "HEIF"])
def test_a_photo_is_turned_too(kind: str) -> None:
    upright = seen(file_of(gradient(), kind, quality=95))
    turned = seen(file_of(gradient(), kind, quality=95, exif=exif_of(6)))
    assert np.array_equal(turned, np.rot90(upright, -1))
    assert np.abs(upright.astype(int) - gradient()).mean() < 4


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_transparency_of_newer_kinds_is_a_mask(kind: str) -> None:
    pixels = np.full((64, 64, 4), 255, np.uint8)
    pixels[8:24, 16:48, 3] = 0
    data = file_of(pixels, kind, quality=100, **({"chroma": 444} if kind == "HEIF" else {}))
    facts = mask_facts(data, "mask", MAX_PIXELS)
    assert facts == MaskFacts(64, 64, 16 * 32 / 64**2, Box(16, 8, 32, 16))
    assert header_of(data) == Header(kind, 64, 64)


def test_the_photo_itself_is_taken_of_several_in_a_file() -> None:
    several = pillow_heif.HeifFile()
    for level in (20, 200):
        several.add_from_pillow(Image.new("RGB", (64, 64), (level, level, level)))
    content = io.BytesIO()
    several.save(content, quality=100, primary_index=1)
    assert abs(int(seen(content.getvalue())[5, 5, 0]) - 200) <= 2


def test_a_mask_is_turned_as_its_exif_says() -> None:
    pixels = np.full((3, 5, 4), 255, np.uint8)
    pixels[0, 0, 3] = 0
    facts = mask_facts(file_of(pixels, exif=exif_of(6)), "mask", MAX_PIXELS)
    assert facts == MaskFacts(3, 5, 1 / 15, Box(2, 0, 1, 1))


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0",
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(20),
        b"Exif\0\0what",
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_with_broken_exif_is_shown_as_it_is(exif: bytes, kind: str) -> None:
    assert seen(file_of(gradient(), kind, exif=exif)).shape == gradient().shape


def test_an_orientation_that_is_a_text_turns_nothing() -> None:
    entry = struct.pack("<HHI4s", 0x0112, 2, 2, b"6\0\0\0")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4)
    assert np.array_equal(seen(file_of(gradient(), exif=exif)), gradient())


@pytest.mark.parametrize("size_px", [(40, 24), (1, 1), (300, 1000)])
def test_the_header_of_a_webp_is_read_without_memory_for_its_pixels(
    size_px: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image.new("RGBA", size_px, (1, 2, 3, 4))
    files = [
        file_of(one, "WEBP", lossless=is_lossless, exif=exif)
        for one in (image, image.convert("RGB"))
        for is_lossless in (True, False)
        for exif in (b"", exif_of(1))
    ]
    assert {data[8:16] for data in files} == {b"WEBPVP8 ", b"WEBPVP8L", b"WEBPVP8X"}
    monkeypatch.setattr(Image, "open", None)
    for data in files:
        assert header_of(data) == Header("WEBP", *size_px)
        with pytest.raises(InvalidRequest, match="{}x{} = ".format(*size_px)):
            decoded(data, "image", size_px[0] * size_px[1] - 1)


def test_a_check_finds_what_decoding_gives() -> None:
    """It looks at strips, and at an eighth of a jpeg's pixels."""
    for data in hostile_files(400, seed=47):
        image = _decoded_or_none(data)
        if image is None:
            with pytest.raises(InvalidRequest):
                image_facts(data, "image", MAX_PIXELS)
            continue
        alpha = image.getchannel("A").getextrema() if image.mode == "RGBA" else (255, 255)
        facts = ImageFacts(image.width, image.height, alpha != (255, 255))
        assert image_facts(data, "image", MAX_PIXELS) == facts


def test_strips_are_joined_to_the_image_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [_decoded_or_none(data) for data in regular_files()]
    monkeypatch.setattr("ray_cluster.imaging.decoding._STRIP_PIXELS", 100)
    cut = [_decoded_or_none(data) for data in regular_files()]
    assert sum(one is not None for one in whole) > 10
    for one, other in zip(whole, cut, strict=True):
        assert np.array_equal(np.array(one), np.array(other))


def _decoded_or_none(data: bytes) -> Image.Image | None:
    try:
        return decoded(data, "image", MAX_PIXELS)
    except InvalidRequest:
        return None


def test_transparency_lies_on_white() -> None:
    alpha, colour = np.mgrid[:256, :256].astype(np.uint8)
    pixels = np.stack([colour, colour, np.zeros_like(colour), alpha], axis=-1)
    data = file_of(pixels)
    weight = alpha[..., None] / 255
    expected = np.rint(pixels[..., :3] * weight + 255 * (1 - weight))
    assert np.array_equal(seen(data), expected)
    assert image_facts(data, "image", MAX_PIXELS).has_alpha


def test_a_channel_of_opaque_pixels_is_no_transparency() -> None:
    image = Image.fromarray(gradient()).convert("RGBA")
    assert not image_facts(file_of(image), "image", MAX_PIXELS).has_alpha
    assert np.array_equal(seen(file_of(image)), gradient())


def test_a_palette_has_its_colours_and_its_transparency() -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    assert seen(file_of(image)).tolist() == [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [0, 255, 0]]]
    data = file_of(image, transparency=b"\xff\x00\x80")
    assert seen(data).tolist() == [[[255, 0, 0], [255] * 3], [[127, 127, 255], [255] * 3]]
    assert mask_facts(data, "mask", MAX_PIXELS) == MaskFacts(2, 2, 0.5, Box(1, 0, 1, 2))


def test_deep_grey_is_rounded_to_eight_bits() -> None:
    deep = np.array([[0, 128, 129, 257, 32767, 32768, 65406, 65407, 65535]], np.uint16)
    grey = seen(file_of(deep))
    assert grey[0, :, 0].tolist() == [0, 0, 1, 1, 127, 128, 254, 255, 255]
    assert np.array_equal(grey[..., 0], grey[..., 2])


def test_deep_grey_may_have_one_transparent_value() -> None:
    rows = b"\0" + struct.pack("!3H", 300, 40_000, 300)
    first, *rest = plain_png(3, 1, depth=16, colour=0, rows=rows)
    data = png_of([first, (b"tRNS", struct.pack("!H", 300)), *rest])
    assert seen(data)[0, :, 0].tolist() == [255, 156, 255]
    assert mask_facts(data, "mask", MAX_PIXELS).ratio == 2 / 3


def test_deep_colours_become_eight_bits() -> None:
    deep = gradient().astype(">u2") * 257
    rows = b"".join(b"\0" + row.tobytes() for row in deep)
    assert np.array_equal(seen(png_of(plain_png(40, 24, depth=16, rows=rows))), gradient())


def test_grey_and_bits_become_colours() -> None:
    grey = gradient()[..., 0]
    expected = np.repeat(grey[..., None], 3, axis=2)
    assert np.array_equal(seen(file_of(grey)), expected)
    with_alpha = Image.merge("LA", [Image.fromarray(grey), Image.new("L", (40, 24), 0)])
    assert np.array_equal(seen(file_of(with_alpha)), np.full_like(expected, 255))
    bits = Image.fromarray(grey > 100)
    assert bits.mode == "1"
    assert np.array_equal(seen(file_of(bits)), np.where(expected > 100, 255, 0))


@pytest.mark.parametrize(
    ("inks", "colour"),
    [
        ((0, 0, 0, 0), (255, 255, 255)),
        ((0, 0, 0, 255), (0, 0, 0)),
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 255, 255, 0), (255, 0, 0)),
    ],
)
def test_inks_become_colours(inks: tuple[int, ...], colour: tuple[int, ...]) -> None:
    image = Image.new("CMYK", (8, 8), inks)
    difference = seen(file_of(image, "JPEG", quality=100)).astype(int) - colour
    assert np.abs(difference).max() <= 2


def test_the_photo_of_a_phone_is_its_first_view() -> None:
    assert image_facts(photo_of_a_phone(), "image", MAX_PIXELS) == ImageFacts(40, 24, False)
    assert np.abs(seen(photo_of_a_phone()).astype(int) - gradient()).mean() < 12


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "AVIF"])
def test_an_animation_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="'image' is an animation") as caught:
        image_facts(animation(kind), "image", MAX_PIXELS)
    assert (caught.value.param, caught.value.code) == ("image", "invalid_image")


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "ICO", "PPM", "JPEG2000"])
def test_other_kinds_are_refused(kind: str) -> None:
    data = file_of(Image.fromarray(gradient()), kind)
    with pytest.raises(InvalidRequest, match="of another kind") as caught:
        image_facts(data, "image", MAX_PIXELS)
    assert "PNG, JPEG, WebP" in caught.value.message


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "CMYK"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "HEIF"])
def test_a_truncated_file_is_refused(kind: str, mode: str) -> None:
    if (mode == "CMYK" and kind != "JPEG") or (kind, mode) == ("JPEG", "RGBA"):
        mode = "RGB"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = file_of(Image.fromarray(noise).convert(mode), kind)
    image_facts(data, "image", MAX_PIXELS)
    for num_bytes in range(0, len(data) - 40, 37):
        with pytest.raises(InvalidRequest, match="cannot be decoded"):
            image_facts(data[:num_bytes], "image", MAX_PIXELS)


def test_as_many_pixels_as_allowed_are_decoded() -> None:
    data = file_of(gradient())
    assert image_facts(data, "image", 40 * 24).width_px == 40
    with pytest.raises(InvalidRequest, match="'mask' has 40x24 = 960 pixels; at most 959"):
        mask_facts(data, "mask", 40 * 24 - 1)


def test_a_strip_is_refused_by_its_longer_side() -> None:
    data = file_of(Image.new("RGBA", (MAX_SIDE_PX, 1)))
    assert image_facts(data, "image", MAX_PIXELS).width_px == MAX_SIDE_PX
    for size_px in ((MAX_SIDE_PX + 1, 1), (1, MAX_SIDE_PX + 1)):
        data = file_of(Image.new("RGBA", size_px))
        for look in (image_facts, mask_facts, decoded):
            with pytest.raises(InvalidRequest, match="65535 px a side") as caught:
                look(data, "image[1]", MAX_PIXELS)
            assert (caught.value.param, caught.value.code) == ("image[1]", "invalid_image")


def test_what_is_half_transparent_is_edited() -> None:
    pixels = np.full((4, 6, 4), 255, np.uint8)
    pixels[1, 2:5, 3] = (127, 128, 0)
    assert mask_facts(file_of(pixels), "mask", MAX_PIXELS) == MaskFacts(
        6, 4, 2 / 24, Box(2, 1, 3, 1)
    )


def test_a_mask_of_everything_has_ratio_1() -> None:
    facts = mask_facts(mask_file(np.ones((4, 6), bool)), "mask", MAX_PIXELS)
    assert facts == MaskFacts(6, 4, 1.0, Box(0, 0, 6, 4))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "HEIF"])
def test_a_mask_needs_an_alpha_channel(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="'mask' has no alpha channel") as caught:
        mask_facts(file_of(gradient(), kind), "mask", MAX_PIXELS)
    assert (caught.value.param, caught.value.code) == ("mask", "invalid_image")


def test_a_mask_must_leave_something_to_edit() -> None:
    pixels = np.full((4, 6, 4), 128, np.uint8)
    with pytest.raises(InvalidRequest, match=r"nothing to edit: its alpha is 128 or more.*Pillow"):
        mask_facts(file_of(pixels), "mask", MAX_PIXELS)
