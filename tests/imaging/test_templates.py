"""What a model works on, and what becomes of it on the canvas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ray_cluster.imaging.blending import Mask, any_in
from ray_cluster.imaging.edit_images import EditPixels, Paste, edit_pixels, finished, mask_facts
from ray_cluster.imaging.encoder import Pixels, encode_image
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.policies.edits import Box, SizeBounds, SizePx, edit_geometry
from ray_cluster.requests import BlobRef, Edit, OutputSpec
from tests.imaging.pictures import exif_of, file_of, gradient, mask_file, pixels_of

IMAGE, MASK = BlobRef("1" * 64, 1), BlobRef("2" * 64, 1)
BOUNDS = SizeBounds(multiple_px=8, min_px=16, max_px=64, native_px=(32, 32))


def edit_of(canvas_px: SizePx, window: Box | None = None, feather_px: int = 0) -> Edit:
    return Edit(IMAGE, canvas_px, 4, MASK, window=window, feather_px=feather_px)


def noise(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def box_mask(width: int, height: int, box: Box) -> Mask:
    mask = np.zeros((height, width), bool)
    mask[box.top_px : box.top_px + box.height_px, box.left_px : box.left_px + box.width_px] = True
    return mask


def test_on_the_models_grid_nothing_is_touched() -> None:
    mask = box_mask(40, 24, Box(3, 4, 5, 6))
    pixels = edit_pixels(file_of(gradient()), mask_file(mask), edit_of((40, 24)), (40, 24))
    assert np.array_equal(pixels.work, gradient())
    assert np.array_equal(pixels.canvas, gradient())
    assert pixels.mask is not None
    assert pixels.weights is not None
    assert np.array_equal(pixels.mask, mask)
    assert np.array_equal(pixels.weights, np.where(mask, 255, 0))
    made = noise(40, 24)
    assert np.array_equal(finished(made, pixels, None), np.where(mask[..., None], made, gradient()))


def test_a_small_image_is_filled_up_by_its_edges_and_cut_off_again() -> None:
    mask = box_mask(10, 7, Box(8, 5, 2, 2))
    image = gradient(10, 7)
    pixels = edit_pixels(file_of(image), mask_file(mask), edit_of((10, 7)), (16, 8))
    assert pixels.work.shape == (8, 16, 3)
    assert np.array_equal(pixels.work[:7, :10], image)
    assert np.array_equal(pixels.work[:7, 10:], np.repeat(image[:, 9:], 6, axis=1))
    assert np.array_equal(pixels.work[7], pixels.work[6])
    assert pixels.mask is not None
    assert np.array_equal(pixels.mask, np.pad(mask, [(0, 1), (0, 6)], mode="edge"))
    made = noise(16, 8)
    result = finished(made, pixels, None)
    assert np.array_equal(result, np.where(mask[..., None], made[:7, :10], image))


def test_a_large_image_is_scaled_in_its_proportions() -> None:
    image = gradient(200, 101)
    pixels = edit_pixels(file_of(image), None, edit_of((200, 101)), (64, 40))
    assert pixels.work.shape == (40, 64, 3)
    content = Image.fromarray(image).resize((64, 32), Image.Resampling.LANCZOS)
    assert np.array_equal(pixels.work[:32], np.asarray(content))
    assert np.array_equal(pixels.work[32:], np.repeat(pixels.work[31:32], 8, axis=0))
    made = noise(64, 40)
    whole = Image.fromarray(made[:32]).resize((200, 101), Image.Resampling.LANCZOS)
    assert np.array_equal(finished(made, pixels, None), np.asarray(whole))


def test_an_image_of_another_size_is_stretched_to_the_canvas() -> None:
    pixels = edit_pixels(file_of(gradient()), None, edit_of((24, 32)), (24, 32))
    stretched = Image.fromarray(gradient()).resize((24, 32), Image.Resampling.LANCZOS)
    assert np.array_equal(pixels.canvas, np.asarray(stretched))
    assert np.array_equal(pixels.work, pixels.canvas)


def test_the_turned_image_is_edited() -> None:
    mask = file_of(np.zeros((24, 40, 4), np.uint8), exif=exif_of(8))
    pixels = edit_pixels(file_of(gradient(), exif=exif_of(6)), mask, edit_of((24, 40)), (24, 40))
    assert np.array_equal(pixels.canvas, np.rot90(gradient(), -1))
    assert pixels.mask is not None
    assert pixels.mask.shape == (40, 24)


def test_transparency_of_the_image_is_white_and_no_mask() -> None:
    image = np.zeros((16, 16, 4), np.uint8)
    pixels = edit_pixels(file_of(image), None, edit_of((16, 16)), (16, 16))
    assert (pixels.work == 255).all()
    assert pixels.mask is None


@pytest.mark.parametrize("row", [0, 7, 150, 299])
def test_a_thin_mask_survives_every_step(row: int) -> None:
    mask = np.zeros((300, 300), bool)
    mask[row, 10:290] = True
    edit = edit_of((150, 150))
    pixels = edit_pixels(file_of(gradient(300, 300)), mask_file(mask), edit, (16, 16))
    assert pixels.mask is not None
    assert pixels.weights is not None
    assert pixels.mask.any(axis=0).all()
    assert (pixels.weights == 255).sum() == 140


def test_a_window_alone_is_worked_on() -> None:
    image, window = noise(100, 80), Box(50, 40, 32, 24)
    mask = box_mask(100, 80, Box(60, 50, 3, 2))
    edit = edit_of((100, 80), window)
    pixels = edit_pixels(file_of(image), mask_file(mask), edit, (32, 24))
    assert np.array_equal(pixels.work, image[40:64, 50:82])
    assert pixels.mask is not None
    assert np.array_equal(np.argwhere(pixels.mask)[[0, -1]], [[10, 10], [11, 12]])
    made = noise(32, 24, seed=1)
    result = finished(made, pixels, window)
    assert np.array_equal(result[50:52, 60:63], made[10:12, 10:13])
    assert np.array_equal(result[~mask], image[~mask])


def test_without_a_mask_nothing_is_pasted() -> None:
    pixels = edit_pixels(file_of(gradient()), None, edit_of((40, 24)), (40, 24))
    assert pixels.weights is None
    assert np.array_equal(finished(noise(40, 24), pixels, None), noise(40, 24))


def test_pasting_back_can_be_switched_off() -> None:
    mask = mask_file(box_mask(40, 24, Box(3, 4, 5, 6)))
    edit = replace(edit_of((40, 24)), paste_back=False)
    pixels = edit_pixels(file_of(gradient()), mask, edit, (40, 24))
    assert pixels.mask is not None
    assert pixels.mask.sum() == 30
    assert np.array_equal(finished(noise(40, 24), pixels, None), noise(40, 24))


def test_the_edit_is_blended_in_within_the_mask() -> None:
    mask = box_mask(40, 24, Box(8, 4, 20, 16))
    edit = edit_of((40, 24), feather_px=3)
    pixels = edit_pixels(file_of(np.zeros((24, 40, 3), np.uint8)), mask_file(mask), edit, (40, 24))
    result = finished(np.full((24, 40, 3), 200, np.uint8), pixels, None)[..., 0]
    assert result[12, 6:14].tolist() == [0, 0, 50, 100, 150, 200, 200, 200]
    assert (result[~mask] == 0).all()


def test_an_image_of_another_size_is_not_pasted() -> None:
    pixels = edit_pixels(file_of(gradient()), None, edit_of((40, 24)), (40, 24))
    with pytest.raises(ValueError, match=r"made \[24, 41, 3\]"):
        finished(noise(41, 24), pixels, None)


@given(data=st.data())
def test_no_pixel_outside_the_mask_ever_changes(data: st.DataObject) -> None:
    width, height = data.draw(st.tuples(st.integers(2, 150), st.integers(2, 150)), "image")
    image, mask = noise(width, height), _drawn_mask(data, width, height)
    size_px = data.draw(st.sampled_from([None, (32, 48), (64, 16), (width, height)]), "size")
    canvas_mask = mask if size_px is None else any_in(mask, size_px)
    crop_to = _bounds(canvas_mask) if data.draw(st.booleans(), "crop") else None
    geometry = edit_geometry((width, height), BOUNDS, size_px=size_px, crop_to=crop_to)
    feather_px = data.draw(st.integers(0, 20), "feather_px")
    edit = edit_of(geometry.canvas_px, geometry.window, feather_px)

    pixels = edit_pixels(file_of(image), mask_file(mask), edit, geometry.work_px)
    assert pixels.work.shape[1::-1] == geometry.work_px
    made = noise(*geometry.work_px, seed=1)
    result = finished(made, pixels, geometry.window)

    edited = any_in(mask, geometry.canvas_px)
    canvas = image
    if geometry.canvas_px != (width, height):
        resized = Image.fromarray(image).resize(geometry.canvas_px, Image.Resampling.LANCZOS)
        canvas = np.asarray(resized)
    assert np.array_equal(result[~edited], canvas[~edited])
    if geometry.is_plain and feather_px == 0:
        assert np.array_equal(result[edited], made[edited])
    elif feather_px == 0 and edited.sum() > 20:
        assert (result[edited] != canvas[edited]).mean() > 0.8


def _drawn_mask(data: st.DataObject, width: int, height: int) -> Mask:
    """Return a mask of lines, boxes or scattered pixels that leaves something to edit."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "mask"))
    mask = rng.random((height, width)) < rng.choice([0.0, 0.01, 0.5])
    for _ in range(rng.integers(1, 4)):
        top, left = rng.integers(height), rng.integers(width)
        mask[top : top + rng.integers(1, 40), left : left + rng.integers(1, 40)] = True
    return mask


def _bounds(mask: Mask) -> Box:
    return mask_facts(mask_file(mask), "mask", mask.size).box


class TestCoder:
    """The same through a process."""

    def test_edits_go_there_and_back(self) -> None:
        image = file_of(noise(100, 80))
        window = Box(50, 40, 32, 24)
        mask = mask_file(box_mask(100, 80, Box(60, 50, 9, 9)))
        cases: list[tuple[bytes | None, Edit, SizePx]] = [
            (None, edit_of((100, 80)), (104, 80)),
            (mask, edit_of((100, 80), feather_px=2), (64, 56)),
            (mask, edit_of((100, 80), window, feather_px=2), (32, 24)),
            (mask, replace(edit_of((96, 64)), paste_back=False), (96, 64)),
        ]
        with ImageCoder() as coder:
            for given_mask, edit, work_px in cases:
                pixels = coder.edit_pixels(image, given_mask, edit, work_px).result(60)
                assert_equal(pixels, edit_pixels(image, given_mask, edit, work_px))
                made = noise(*work_px, seed=1)
                paste = Paste(pixels, edit.window)
                data = coder.submit(made, OutputSpec(), {}, paste).result(60)
                whole = finished(made, pixels, edit.window)
                assert np.array_equal(pixels_of(data), whole)
                assert data == encode_image(whole, OutputSpec(), {})

    def test_facts_are_the_same(self) -> None:
        mask = mask_file(box_mask(100, 80, Box(60, 50, 9, 9)))
        with ImageCoder() as coder:
            facts = coder.mask_facts(mask, "mask", 8000).result(60)
            assert facts == mask_facts(mask, "mask", 8000)
            assert coder.image_facts(mask, "image", 8000).result(60).has_alpha


def assert_equal(one: EditPixels, other: EditPixels) -> None:
    for name in ("work", "mask", "canvas", "weights"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)
            # torch takes no other arrays without a warning
            assert left.flags.writeable
            assert right.flags.writeable
