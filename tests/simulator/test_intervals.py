"""Means and their intervals are those of the textbook."""

import math

import numpy as np
import pytest
from scipy import stats

from ray_cluster.simulator.intervals import mean_of, paired_difference


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
