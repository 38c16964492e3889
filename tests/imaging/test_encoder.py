from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.encoder import ImageCoder, Pixels, encode_image, read_recipe
from ray_cluster.imaging.worker_process import CoderProcess, ProcessDied
from ray_cluster.requests import ImageFormat, OutputSpec
from tests.fakes import image_request

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {
    "prompt": "ein rötlicher Kreis\nauf 蓝色 🟦",
    "negative_prompt": "unscharf, brûlé",
    "seed": "7",
}


def gradient(width: int = 40, height: int = 24) -> Pixels:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 9, columns * 5, rows + columns], axis=-1).astype(np.uint8)


def pixels_of(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


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


class TestCoder:
    def test_it_returns_what_encode_image_returns(self) -> None:
        with ImageCoder(2) as coder:
            specs = [OutputSpec(), OutputSpec("jpeg", 70, False), OutputSpec("webp", 70, False)]
            futures = [coder.submit(gradient(), spec, RECIPE) for spec in specs * 4]
            expected = [encode_image(gradient(), spec, RECIPE) for spec in specs * 4]
            assert [future.result(60) for future in futures] == expected

    def test_what_cannot_be_coded_fails_alone(self) -> None:
        with ImageCoder() as coder:
            bad = coder.submit(np.zeros((2, 2), np.uint8), OutputSpec(), {})
            wide = coder.submit(np.zeros((1, 20_000, 3), np.uint8), OutputSpec("webp"), {})
            good = coder.submit(gradient(), OutputSpec(), RECIPE)
            with pytest.raises(RequestFailed, match="uint8"):
                bad.result(60)
            with pytest.raises(RequestFailed) as caught:
                wide.result(60)
            assert caught.value.stage == "coding"
            assert read_recipe(good.result(60)) == RECIPE

    def test_a_killed_process_is_replaced_and_the_image_coded_again(self) -> None:
        with ImageCoder() as coder:
            coder.submit(gradient(), OutputSpec(), {}).result(60)
            (first,) = coder.process_ids
            big = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
            future = coder.submit(big, OutputSpec(), {})
            time.sleep(0.03)
            os.kill(first, signal.SIGKILL)
            assert np.array_equal(pixels_of(future.result(60)), big)
            assert coder.process_ids != [first]
            os.kill(coder.process_ids[0], signal.SIGKILL)
            again = coder.submit(gradient(), OutputSpec(), RECIPE)
            assert read_recipe(again.result(60)) == RECIPE

    def test_an_image_that_kills_two_processes_fails_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = CoderProcess.run
        tried: list[int] = []

        def deadly(self: CoderProcess, header: bytes, payload: bytes) -> bytes:
            if b"poison" in header:
                tried.append(self.pid)
                os.kill(self.pid, signal.SIGKILL)
                raise ProcessDied("killed")
            return run(self, header, payload)

        monkeypatch.setattr(CoderProcess, "run", deadly)
        with ImageCoder() as coder:
            (first,) = coder.process_ids
            poison = coder.submit(gradient(), OutputSpec(), {"prompt": "poison"})
            good = coder.submit(gradient(), OutputSpec(), RECIPE)
            with pytest.raises(RequestFailed) as caught:
                poison.result(60)
            assert tried[0] == first
            assert len(set(tried)) == len(tried) == 2
            assert read_recipe(good.result(60)) == RECIPE
        message = caught.value.message
        assert caught.value.stage == "coding"
        assert "Send the request again" in message
        assert "output_format" in message
        assert not any(str(pid) in message for pid in tried)

    def test_a_process_that_cannot_be_started_costs_one_image(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_process() -> CoderProcess:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        with ImageCoder() as coder:
            os.kill(coder.process_ids[0], signal.SIGKILL)
            with monkeypatch.context() as patch:
                patch.setattr("ray_cluster.imaging.encoder._start", no_process)
                with pytest.raises(BlockingIOError):
                    coder.submit(gradient(), OutputSpec(), RECIPE).result(60)
            again = coder.submit(gradient(), OutputSpec(), RECIPE)
            assert read_recipe(again.result(60)) == RECIPE

    def test_its_processes_end_when_their_parent_is_killed(self) -> None:
        code = (
            "import time; from ray_cluster.imaging.encoder import ImageCoder\n"
            "print(ImageCoder(2).process_ids, flush=True); time.sleep(60)"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert parent.stdout is not None
        with parent, parent.stdout:
            children = [int(one) for one in parent.stdout.readline().strip("[]\n").split(",")]
            parent.kill()
        until_s = time.monotonic() + 60
        while any(_is_running(child) for child in children):
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def test_it_imports_neither_torch_nor_ray_nor_the_parents_main_module(self) -> None:
        code = (
            "import sys, ray_cluster.imaging.encoder\n"
            "print(sorted({name.split('.')[0] for name in sys.modules}))"
        )
        output = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
        loaded = set(output.strip("[]\n").replace("'", "").split(", "))
        assert {"numpy", "PIL"} <= loaded
        assert not loaded & {
            "torch",
            "ray",
            "fastapi",
            "pydantic",
            "cv2",
            "scipy",
            "multiprocessing",
        }


def _is_running(process_id: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
