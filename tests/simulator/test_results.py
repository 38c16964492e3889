"""Means, intervals and paired differences are those of the textbook."""

import math

import numpy as np
import pytest
from scipy import stats

from ray_cluster.simulator.results import Row, Rows, mean_of, paired_difference


def test_the_interval_is_students() -> None:
    values = [0.2, 0.5, 0.4, 0.9]
    mean = mean_of(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (mean.value - mean.half_width, mean.value + mean.half_width) == pytest.approx(
        (low, high)
    )
    assert mean.as_points() == f"50.0 ± {100 * mean.half_width:.1f}"


def test_one_value_has_no_interval_and_none_is_no_mean() -> None:
    assert math.isnan(mean_of([0.25]).half_width)
    assert mean_of([0.25]).as_points() == "25.0"
    # JSON has no word for what is not a number
    assert mean_of([0.25]).as_figures() == {"value": 0.25, "half_width": None, "num": 1}
    assert mean_of([0.25, 0.25]).as_figures()["half_width"] == 0.0
    with pytest.raises(ValueError, match="at least one"):
        mean_of([])


def test_pairs_take_away_what_the_seeds_have_in_common() -> None:
    theirs = [0.1, 0.9, 0.5]
    difference = paired_difference([one + 0.05 for one in theirs], theirs)
    assert difference.value == pytest.approx(0.05)
    assert difference.half_width == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], theirs)


def rows(policy: str, load: str, figures: dict[int, float]) -> list[Row]:
    return [Row(policy, seed, {"share": value}, load) for seed, value in figures.items()]


def test_differences_are_paired_by_seed_and_go_over_loads() -> None:
    levels = {0: 0.5, 2: 0.9, 1: 0.7}
    found = Rows(
        [
            *rows("b", "low", levels),
            *rows("a", "low", {seed: one + 0.02 + seed % 2 / 100 for seed, one in levels.items()}),
            *rows("a", "high", dict.fromkeys(levels, 1.0)),
            *rows("b", "high", dict.fromkeys(levels, 1.0)),
        ]
    )
    gain = found.gain("share", "a", "b", ["low"])
    assert gain.value == pytest.approx(0.07 / 3)
    # Student's t for three values: 4.30 standard errors
    assert gain.half_width == pytest.approx(0.04303 / 3, abs=1e-5)
    assert found.gain("share", "a", "b", ["low", "high"]).value == pytest.approx(0.07 / 6)
    assert found.samples("share", "b", ["low", "high"]) == pytest.approx([0.75, 0.85, 0.95])
    with pytest.raises(ValueError, match="zip"):
        Rows([*rows("a", "low", {0: 1.0}), *rows("b", "low", levels)]).gain(
            "share", "a", "b", ["low"]
        )


def test_a_class_counts_in_the_seeds_in_which_it_came() -> None:
    found = Rows(
        [
            Row("a", 0, {}, by_class={"256": 1.0, "2048": 0.0}),
            Row("a", 1, {}, by_class={"256": 0.5}),
            Row("b", 1, {}, by_class={"256": 0.0}),
        ]
    )
    means = found.class_means("a", None)
    assert (means["256"].value, means["256"].num) == (0.75, 2)
    assert (means["2048"].value, means["2048"].num) == (0.0, 1)
    assert found.class_means("a", None, if_absent=1.0)["2048"].value == 0.5
