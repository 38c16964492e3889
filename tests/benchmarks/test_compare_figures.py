from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from benchmarks.serving.compare.figures import Attainments, crossing
from benchmarks.serving.compare.images import compare_images

LOADS = (0.5, 1.0, 1.5)


def shares(**by_contender: list[list[float]]) -> Attainments:
    return Attainments(LOADS, {name: np.array(rows) for name, rows in by_contender.items()})


@pytest.mark.parametrize(
    ("attainments", "load", "bound"),
    [
        ((1.0, 0.9, 0.5), 1.0, ""),
        ((1.0, 0.95, 0.85), 1.25, ""),
        ((0.95, 0.85, 0.1), 0.75, ""),
        ((0.8, 0.7, 0.6), 0.5, "below"),
        # a mean that is the level but for the last bit
        ((float(np.nextafter(0.9, 0)), 0.7, 0.6), 0.5, ""),
        ((1.0, 0.99, 0.95), 1.5, "above"),
        # falls through it twice: goodput ends at the first
        ((0.95, 0.85, 0.95), 0.75, ""),
    ],
)
def test_goodput_is_where_attainment_first_falls_through_the_level(
    attainments: tuple[float, ...], load: float, bound: str
) -> None:
    found = crossing(LOADS, attainments, 0.9)
    assert found.load == pytest.approx(load)
    assert found.bound == bound


@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.lists(st.floats(0, 0.5), min_size=3, max_size=3),
)
def test_more_in_time_never_means_less_goodput(low: list[float], more: list[float]) -> None:
    high = [min(1.0, a + b) for a, b in zip(low, more, strict=True)]
    assert crossing(LOADS, high, 0.9).load >= crossing(LOADS, low, 0.9).load - 1e-9


def test_difference_of_pairs_is_surer_than_either_of_them() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.uniform(0.2, 0.8, (3, 8))
    found = shares(mine=(theirs + 0.1).tolist(), theirs=theirs.tolist())
    gain = found.gain("mine", "theirs", 1)
    assert (gain.low, gain.value, gain.high) == pytest.approx((0.1, 0.1, 0.1))
    alone = found.at("mine", 1)
    assert alone.high - alone.low > 0.1
    assert alone.low < alone.value < alone.high


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        values = rng.normal(0.5, 0.1, (1, 20))
        estimate = Attainments((1.0,), {"one": values}).at("one", 0)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_ratio_of_goodputs_and_what_one_has_where_the_other_is_strained() -> None:
    found = shares(
        mine=[[1.0, 1.0], [0.95, 0.95], [0.85, 0.85]],
        theirs=[[0.95, 0.95], [0.75, 0.75], [0.45, 0.45]],
    )
    # 1.25 over 0.625
    ratio = found.goodput_ratio("mine", "theirs", 0.9)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    where, there = found.where("theirs", 0.6, "mine")
    assert where.load == pytest.approx(1.25)
    assert there.value == pytest.approx(0.9)
    assert found.best(["mine", "theirs"], 2) == "mine"


def test_loads_must_rise_and_shapes_agree() -> None:
    with pytest.raises(ValueError, match="rising"):
        Attainments((1.0, 0.5), {"one": np.zeros((2, 3))})
    with pytest.raises(ValueError, match="rising"):
        Attainments((0.5, 1.0), {"one": np.zeros((2, 3)), "two": np.zeros((2, 4))})


def save_image(folder: Path, name: str, pixels: NDArray[np.int64]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(folder / name)


@pytest.mark.parametrize("reference", ["one-by-one", "one-by-one/guarded"])
@pytest.mark.parametrize(
    ("dtype", "change", "is_equal"),
    [
        ("float32", 1, True),
        ("float32", 2, False),
        ("bfloat16", 2, True),
        ("bfloat16", 100, False),
    ],
)
def test_images_may_differ_by_rounding(
    tmp_path: Path, reference: str, dtype: str, change: int, is_equal: bool
) -> None:
    pixels = np.random.default_rng(0).integers(0, 100, (16, 16, 3))
    trace = tmp_path / "images" / "poisson-0"
    save_image(trace / reference.replace("/", "-"), "003.png", pixels)
    changed = pixels + change * (pixels % 2)
    save_image(trace / "static-guarded", "003.png", changed)
    save_image(trace / "static-guarded", "007.png", pixels)
    contenders = [reference, "static/guarded", "ours"]
    [found] = compare_images(tmp_path, contenders, dtype)
    assert (found["reference"], found["num_images"]) == (reference, 1)
    assert (found["largest_difference_255"], found["equal"]) == (change, is_equal)


def test_without_images_one_after_the_other_there_is_nothing_to_compare_with(
    tmp_path: Path,
) -> None:
    pixels = np.zeros((16, 16, 3), np.int64)
    for name in ("static-guarded", "one-by-one"):
        save_image(tmp_path / "images" / "poisson-0" / name, "000.png", pixels)
    assert not list(compare_images(tmp_path, ["static/guarded", "ours"], "float32"))
    assert not list(compare_images(tmp_path, ["static/guarded", "one-by-one/guarded"], "float32"))
