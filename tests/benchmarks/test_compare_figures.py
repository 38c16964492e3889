import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
        ((1.0, 0.99, 0.95), 1.5, "above"),
        # falls through it twice: what is borne without doubt ends at the first
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


@pytest.mark.parametrize(("change", "is_equal"), [(1, True), (2, False)])
def test_images_may_differ_by_one_value(tmp_path, change: int, is_equal: bool) -> None:
    for name, value in (("one-by-one", 100), ("static-guarded", 100 + change)):
        folder = tmp_path / "poisson-0" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (4, 4), (value, 0, 0)).save(folder / "003.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "poisson-0" / "static-guarded" / "007.png")
    [found] = compare_images(tmp_path, ["one-by-one", "static/guarded", "ours"], "one-by-one")
    assert (found.num_images, found.most, found.is_equal) == (1, change, is_equal)
