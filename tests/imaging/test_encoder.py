from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.encoder import Pixels, encode_image, read_recipe
from ray_cluster.requests import ImageFormat, OutputSpec
from tests.fakes import image_request
from tests.imaging.pictures import RECIPE, gradient, pixels_of


def test_png_is_lossless_and_carries_the_recipe() -> None:
    data = encode_image(gradient(), OutputSpec(), RECIPE)
    assert np.array_equal(pixels_of(data), gradient())
    assert read_recipe(data) == RECIPE
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.info["ray_cluster:prompt"] == RECIPE["prompt"]


def test_a_requests_own_recipe_comes_back() -> None:
    request = image_request(prompt="红色", negative_prompt="é", guidance_scale=2.5, seed=2**63 - 1)
    assert read_recipe(encode_image(gradient(), request.output, request.recipe())) == (
        request.recipe()
    )


def test_without_metadata_a_png_carries_nothing() -> None:
    data = encode_image(gradient(), OutputSpec(metadata=False), RECIPE)
    assert b"tEXt" not in data
    assert b"iTXt" not in data
    with pytest.raises(InvalidRequest, match="carries no recipe"):
        read_recipe(data)


@pytest.mark.parametrize("image_format", ["jpeg", "webp"])
def test_quality_is_honoured_over_its_whole_range(image_format: ImageFormat) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    images = [encode_image(noise, OutputSpec(image_format, q, False), {}) for q in (0, 50, 100)]
    assert [Image.open(io.BytesIO(data)).format for data in images] == [image_format.upper()] * 3
    assert len(images[0]) < len(images[1]) < len(images[2])
    best = encode_image(gradient(), OutputSpec(image_format, None, False), {})
    error = np.abs(pixels_of(best).astype(int) - gradient())
    assert error.mean() < 3


@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
def test_odd_sizes_and_strided_pixels_are_coded(width: int, image_format: ImageFormat) -> None:
    strided = gradient(2 * width, 5)[:, ::2]
    data = encode_image(strided, OutputSpec(image_format), {})
    assert pixels_of(data).shape == (5, width, 3)


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8)]
)
def test_other_arrays_are_refused(pixels: Pixels) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\]"):
        encode_image(pixels, OutputSpec(), {})


class TestForeignFiles:
    def test_other_formats_have_no_recipe(self) -> None:
        for data in (b"", b"hello", encode_image(gradient(), OutputSpec("jpeg"), {})):
            with pytest.raises(InvalidRequest, match="not a png"):
                read_recipe(data)

    def test_a_truncated_png_gives_all_of_its_recipe_or_says_so(self) -> None:
        data = encode_image(gradient(), OutputSpec(), RECIPE)
        pixels_start = data.index(b"IDAT") + len(b"IDAT")
        for length in range(pixels_start):
            with pytest.raises(InvalidRequest, match=r"truncated|not a png"):
                read_recipe(data[:length])
        for length in range(pixels_start, len(data)):
            assert read_recipe(data[:length]) == RECIPE

    def test_a_damaged_recipe_is_never_believed(self) -> None:
        data = encode_image(gradient(), OutputSpec(), RECIPE)
        for position in range(data.index(b"IDAT") - 4):
            damaged = bytearray(data)
            damaged[position] ^= 0x20
            with pytest.raises(InvalidRequest):
                read_recipe(bytes(damaged))

    def test_text_of_other_programs_is_ignored(self) -> None:
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        info.add_text("parameters", "a cat, steps: 3", zip=True)
        info.add_itxt("XML:com.adobe.xmp", "<x/>", "en", "k")
        buffer = io.BytesIO()
        Image.fromarray(gradient()).save(buffer, "PNG", pnginfo=info)
        with pytest.raises(InvalidRequest, match="carries no recipe"):
            read_recipe(buffer.getvalue())
