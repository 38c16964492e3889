"""Whatever a client sends, it gets an error about its image, and costs no more than is allowed."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.decoding import MAX_JPEG_SCANS, Header, header_of
from ray_cluster.imaging.edit_images import ImageFacts, edit_pixels, image_facts, mask_facts
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.imaging.processes.worker_process import CoderProcess, Message, ProcessDied
from ray_cluster.requests import BlobRef, Edit
from tests.imaging.hostile import (
    bombs,
    hostile_files,
    many_scans,
    overfull,
    peak_bytes,
    reader_of,
    regular_files,
    vast_png,
    vast_scans,
)
from tests.imaging.pictures import exif_of, file_of

MAX_PIXELS = 1 << 20
SIDE = 8192
NUM_FILES = 1000
MIB = 1 << 20


def test_a_thousand_hostile_files_are_refused_or_decoded_whole() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = {"image": 0, "mask": 0}
    for data in hostile_files(NUM_FILES, seed=34):
        for param, check in (("image", image_facts), ("mask", mask_facts)):
            refused = _refusal(check, data, param)
            if refused is not None:
                num_refused[param] += 1
                assert (refused.param, refused.code) == (param, "invalid_image")
                assert refused.message.startswith(f"'{param}' ")
                assert len(refused.message) < 350
                assert " at 0x" not in refused.message
            elif param == "image":
                edit = Edit(BlobRef("0", 1), (16, 16), 4)
                assert edit_pixels(data, None, edit, (16, 16)).work.shape == (16, 16, 3)
    # damage to colours is no error
    assert 400 < num_refused["image"] < num_refused["mask"] < NUM_FILES
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 250 << 10


@pytest.mark.parametrize("index", range(len(bombs())))
def test_every_bomb_is_refused(index: int) -> None:
    data = bombs()[index]
    with pytest.raises(InvalidRequest) as caught:
        image_facts(data, "image", MAX_PIXELS)
    assert caught.value.code == "invalid_image"


def test_a_bomb_is_refused_for_its_header() -> None:
    with pytest.raises(InvalidRequest, match="1025x1025 = 1050625 pixels; at most 1048576"):
        image_facts(bombs()[0], "image", MAX_PIXELS)


def test_what_a_file_holds_beyond_its_pixels_is_not_decoded() -> None:
    assert image_facts(overfull(), "image", MAX_PIXELS).height_px == 24


def test_only_a_jpeg_of_absurdly_many_scans_is_refused() -> None:
    assert image_facts(many_scans(MAX_JPEG_SCANS), "image", MAX_PIXELS).width_px == 40
    with pytest.raises(InvalidRequest, match="more than the 32 progressive scans allowed"):
        image_facts(many_scans(MAX_JPEG_SCANS + 1), "image", MAX_PIXELS)


def test_a_scan_bomb_of_64_megapixels_is_refused_before_its_pixels_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", _no_load)
    data = vast_scans(SIDE, MAX_JPEG_SCANS + 1)
    assert header_of(data) == Header("JPEG", SIDE, SIDE)
    for check in (image_facts, mask_facts):
        with pytest.raises(InvalidRequest, match="progressive scans allowed"):
            check(data, "image", SIDE * SIDE)
    with pytest.raises(InvalidRequest, match="cannot be decoded: the pixels were asked for"):
        image_facts(vast_scans(SIDE, MAX_JPEG_SCANS), "image", SIDE * SIDE)


def test_scans_behind_a_long_run_of_fill_bytes_are_counted() -> None:
    """A marker may begin with any number of 0xff: a search for each would take hours."""
    data = many_scans(MAX_JPEG_SCANS + 1)
    last = data.rindex(b"\xff\xda")
    fill = b"\xff" * (1 << 20)
    with pytest.raises(InvalidRequest, match="progressive scans"):
        image_facts(data[:last] + fill + b"\0" + fill + data[last:], "image", MAX_PIXELS)


def test_scans_behind_a_comment_that_looks_like_an_end_are_counted() -> None:
    data = many_scans(100)
    last = data.rindex(b"\xff\xda")
    comment = b"\xff\xfe\x00\x06\xff\xd9\xff\xd9"
    hidden = data[:last].replace(b"\xff\xda", comment + b"\xff\xda", 3) + data[last:]
    with pytest.raises(InvalidRequest, match="progressive scans"):
        image_facts(hidden, "image", MAX_PIXELS)


@pytest.mark.parametrize(
    ("depth", "colour", "more", "bytes_per_pixel"),
    [
        (8, 2, [], 4),
        (16, 0, [(b"tRNS", b"\0\1")], 2),
        (1, 3, [(b"PLTE", bytes(6)), (b"tRNS", b"\0")], 1),
        (8, 6, [], 4),
    ],
)
def test_the_check_of_64_megapixels_takes_no_copy_of_them(
    depth: int, colour: int, more: list[tuple[bytes, bytes]], bytes_per_pixel: int
) -> None:
    data = vast_png(SIDE, depth=depth, colour=colour, more=more)
    assert len(data) < 1 << 20
    with ImageCoder(1) as coder:
        before = peak_bytes(reader_of(coder))
        facts = coder.image_facts(data, "image", SIDE * SIDE).result(60)
        is_clear = colour in {3, 6}
        assert facts == ImageFacts(SIDE, SIDE, has_alpha=is_clear)
        (process_id,) = coder.process_ids
        assert peak_bytes(process_id) - before < bytes_per_pixel * SIDE * SIDE + 40 * MIB


def test_a_webp_has_the_memory_that_its_decoder_needs() -> None:
    side = 3000
    data = file_of(Image.new("RGB", (side, side)), "WEBP", lossless=True, method=0, quality=0)
    with ImageCoder(1) as coder:
        facts = coder.image_facts(data, "image", side * side).result(60)
        assert facts == ImageFacts(side, side, has_alpha=False)
        edit = Edit(BlobRef("0", 1), (side, side), 4)
        pixels = coder.edit_pixels(data, None, edit, (64, 64)).result(60)
        assert pixels.canvas.shape == (side, side, 3)


class TestCoder:
    def test_its_process_survives_hostile_files(self) -> None:
        files = [*regular_files(), *bombs(), *random.Random(1).sample([*hostile_files(200, 2)], 30)]
        with ImageCoder(1) as coder:
            process_id = reader_of(coder)
            futures = [coder.image_facts(data, "image", MAX_PIXELS) for data in files]
            here = [partial(image_facts, data, "image", MAX_PIXELS) for data in files]
            assert [_outcome(one.result) for one in futures] == [_outcome(one) for one in here]
            assert coder.process_ids == [process_id]

    def test_its_memory_is_bounded_by_the_pixels_allowed(self) -> None:
        # one bit per pixel in the file, four bytes in memory, and turned
        side = 1 << 12
        palette = Image.new("P", (side, side))
        palette.putpalette([1, 2, 3, 4, 5, 6])
        data = file_of(palette, bits=1, transparency=b"\x00\x80", exif=exif_of(6), compress_level=1)
        assert len(data) < 1 << 16
        with ImageCoder() as coder:
            process_id = reader_of(coder)
            for _ in range(3):
                facts = coder.mask_facts(data, "mask", side * side).result(60)
                assert (facts.width_px, facts.ratio) == (side, 1.0)
                with pytest.raises(InvalidRequest):
                    coder.mask_facts(data, "mask", side * side - 1).result(60)
            # as P, as RGBA, turned; numpy, Pillow and Python take 60 MiB
            assert peak_bytes(process_id) < 12 * side * side + 100 * MIB

    @pytest.mark.parametrize(
        ("signal_number", "name"), [(signal.SIGKILL, "image"), (signal.SIGSEGV, "mask")]
    )
    def test_a_deadly_file_is_the_clients_mistake(
        self, monkeypatch: pytest.MonkeyPatch, signal_number: signal.Signals, name: str
    ) -> None:
        monkeypatch.setattr(CoderProcess, "run", _deadly_for(b"deadly", signal_number))
        good = regular_files()[1]
        with ImageCoder() as coder:
            check = coder.image_facts if name == "image" else coder.mask_facts
            future = check(b"deadly", name, MAX_PIXELS)
            with pytest.raises(InvalidRequest, match="cannot be decoded") as caught:
                future.result(60)
            assert (caught.value.param, caught.value.code) == (name, "invalid_image")
            assert coder.image_facts(good, "image", MAX_PIXELS).result(60).width_px == 40

    def test_an_edit_whose_decoding_is_deadly_fails_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CoderProcess, "run", _deadly_for(b"deadly", signal.SIGKILL))
        edit = Edit(BlobRef("0", 1), (16, 16), 4)
        with ImageCoder() as coder:
            bad = coder.edit_pixels(b"deadly", None, edit, (16, 16))
            good = coder.edit_pixels(regular_files()[0], None, edit, (16, 16))
            with pytest.raises(RequestFailed) as caught:
                bad.result(60)
            assert caught.value.stage == "coding"
            assert "out of memory" in caught.value.message
            assert good.result(60).work.shape == (16, 16, 3)


def _no_load(_: object) -> None:
    raise AssertionError("the pixels were asked for")


def _refusal(check: Callable[..., Any], data: bytes, param: str) -> InvalidRequest | None:
    """Return the error of a file; None if it is decoded, and no larger than allowed."""
    try:
        facts = check(data, param, MAX_PIXELS)
    except InvalidRequest as error:
        return error
    assert 0 < facts.width_px * facts.height_px <= MAX_PIXELS
    return None


def _deadly_for(content: bytes, signal_number: signal.Signals) -> Any:
    run = CoderProcess.run

    def deadly(self: CoderProcess, job: Message, max_s: float) -> Message:
        if content in job.parts:
            os.kill(self.pid, signal_number)
            raise ProcessDied("killed")
        return run(self, job, max_s)

    return deadly


def _outcome(facts: Callable[[], Any]) -> object:
    try:
        return facts()
    except InvalidRequest as error:
        return (error.message, error.param, error.code)


def test_the_files_are_the_same_every_time() -> None:
    assert list(hostile_files(100, 5)) == list(hostile_files(100, 5))
    assert np.mean([len(one) for one in hostile_files(100, 5)]) > 100
