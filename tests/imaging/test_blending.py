from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.imaging.blending import Mask, any_in, blend_in, blend_weights

SIDES = st.integers(1, 12)


def covered(index: int, side: int, length: int) -> range:
    """Return the pixels of ``length`` that one of ``side`` pixels covers, in whole or in part."""
    start, stop = Fraction(index * length, side), Fraction((index + 1) * length, side)
    return range(math.floor(start), math.ceil(stop))


@given(shape=st.tuples(SIDES, SIDES), size_px=st.tuples(SIDES, SIDES), seed=st.integers(0, 999))
def test_a_pixel_is_set_if_any_that_it_covers_is(
    shape: tuple[int, int], size_px: tuple[int, int], seed: int
) -> None:
    mask = np.random.default_rng(seed).random(shape) < 0.2
    width, height = size_px
    expected = [
        [
            any(
                mask[y, x]
                for y in covered(row, height, shape[0])
                for x in covered(column, width, shape[1])
            )
            for column in range(width)
        ]
        for row in range(height)
    ]
    assert any_in(mask, size_px).tolist() == expected


@pytest.mark.parametrize("side", [7, 16, 63, 64, 300])
def test_a_thin_line_is_never_lost(side: int) -> None:
    for column in range(300):
        mask = np.zeros((300, 300), bool)
        mask[:, column] = True
        assert any_in(mask, (side, side)).any(axis=1).all()


def test_weights_grow_from_the_masks_edge_inwards() -> None:
    mask = np.zeros((9, 11), bool)
    mask[1:8, 2:9] = True
    weights = blend_weights(mask, 2)
    ring = [85] * 7
    assert weights[1, 2:9].tolist() == ring
    assert weights[4].tolist() == [0, 0, 85, 170, 255, 255, 255, 170, 85, 0, 0]
    # the nearest pixel outside is the same in a corner
    assert weights[2, 3] == 170
    assert np.array_equal(weights > 0, mask)
    assert np.array_equal(blend_weights(mask, 0), np.where(mask, 255, 0))


def test_distances_are_euclidean() -> None:
    mask = np.ones((9, 9), bool)
    mask[0, 0] = False
    weights = blend_weights(mask, 9)
    assert weights[3, 4] == round(255 * 5 / 10)
    assert weights[0, 1] == round(255 / 10)


@pytest.mark.parametrize("feather_px", [8, 32, 256])
def test_a_feather_wider_than_a_part_of_the_mask_shows_its_middle_whole(feather_px: int) -> None:
    mask = np.zeros((60, 100), bool)
    mask[5:11, 5:90] = mask[20:51, 20:51] = mask[59, 99] = True
    weights = blend_weights(mask, feather_px)
    assert np.array_equal(weights > 0, mask)
    # of six rows, two are in the middle; the line fades to its edge all the same
    assert (weights[7:9, 10:85] == 255).all()
    assert weights[5, 40] == pytest.approx(255 / 3, abs=5)
    assert weights[35, 35] == weights[59, 99] == 255


def test_specks_without_number_are_blended_too() -> None:
    mask = np.zeros((520, 520), bool)
    mask[::2, ::2] = True
    assert np.array_equal(blend_weights(mask, 4), np.where(mask, 255, 0))


def test_the_border_of_the_image_is_no_border_of_the_mask() -> None:
    mask = np.zeros((4, 8), bool)
    mask[:, :5] = True
    assert blend_weights(mask, 3).tolist() == [[255, 255, 191, 128, 64, 0, 0, 0]] * 4
    assert (blend_weights(np.ones((4, 8), bool), 3) == 255).all()


@given(shape=st.tuples(SIDES, SIDES), feather_px=st.integers(1, 6), seed=st.integers(0, 999))
def test_weights_are_those_of_all_distances(
    shape: tuple[int, int], feather_px: int, seed: int
) -> None:
    mask = np.random.default_rng(seed).random(shape) < 0.7
    outside = np.argwhere(~mask)
    weights = blend_weights(mask, feather_px)
    with pytest.MonkeyPatch.context() as patch:
        # and some rows at a time
        patch.setattr("ray_cluster.imaging.blending._STRIP_PIXELS", 1)
        assert np.array_equal(blend_weights(mask, feather_px), weights)
    plain = np.zeros(shape)
    for position in np.ndindex(shape):
        distance = min((math.dist(position, other) for other in outside), default=math.inf)
        plain[position] = round(255 * min(1.0, distance / (feather_px + 1)))
    for part in connected(mask):
        deepest = max(plain[one] for one in part)
        for one in part:
            assert abs(int(weights[one]) - plain[one] * 255 / deepest) <= 0.5 + 1e-4
    assert np.array_equal(weights > 0, mask)


def connected(mask: Mask) -> list[set[tuple[int, int]]]:
    """Return the parts of a mask that hang together, be it by corners."""
    left, parts = {(int(y), int(x)) for y, x in np.argwhere(mask)}, []
    while left:
        part, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            part.add((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        parts.append(part)
    return parts


def test_blending_is_rounded_and_leaves_the_rest_alone() -> None:
    rng = np.random.default_rng(0)
    below, above = rng.integers(0, 256, (2, 256, 64, 3), dtype=np.uint8)
    weights = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 64, axis=1)
    share = weights[..., None] / 255
    expected = np.floor(above * share + below * (1 - share) + 0.5)
    result = below.copy()
    blend_in(result, above, weights)
    assert np.abs(result - expected).max() <= 1
    assert (result == expected).mean() > 0.999
    assert np.array_equal(result[0], below[0])
    assert np.array_equal(result[255], above[255])


def mask_of(rows: list[str]) -> Mask:
    return np.array([[one == "#" for one in row] for row in rows])


def test_a_mask_can_be_made_larger() -> None:
    small = mask_of(["#.", ".."])
    assert np.array_equal(any_in(small, (4, 4)), mask_of(["##..", "##..", "....", "...."]))
    # the middle pixel covers half of both
    assert np.array_equal(any_in(small, (3, 3)), mask_of(["##.", "##.", "..."]))
