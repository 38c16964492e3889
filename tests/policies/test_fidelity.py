"""Few steps are as few as a table says, and what they keep and spend is said truly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.fidelity import LEAST_SSIM, FewerSteps, StepTable, Terms

TABLE = StepTable(
    "ddim",
    2.0,
    (FewerSteps(10, 5, 3, 0.97, 0.91), FewerSteps(20, 6, 4, 0.96, 0.88), FewerSteps(50, 8, 4)),
)


@pytest.mark.parametrize(
    ("asked", "balanced", "fast"),
    [(1, 1, 1), (4, 4, 3), (10, 5, 3), (11, 6, 4), (20, 6, 4), (21, 8, 4), (50, 8, 4)],
)
def test_between_rows_the_one_with_more_steps_counts(asked: int, balanced: int, fast: int) -> None:
    row = TABLE.row(asked)
    assert row is not None
    assert (row.asked, row.balanced, row.fast) == (asked, balanced, fast)


def test_more_steps_than_were_measured_are_not_guessed_at() -> None:
    assert TABLE.row(51) is None
    assert TABLE.most_asked == 50


@given(st.integers(1, 50))
def test_more_steps_never_keep_less(asked: int) -> None:
    row = TABLE.row(asked)
    assert row is not None
    terms = Terms("exact", asked, 1, row)
    order = [None, "fast", "balanced", "exact"]
    kept = [order.index(terms.fidelity(steps)) for steps in range(1, asked + 1)]
    assert all(before <= after for before, after in pairwise(kept))
    assert order[kept[-1]] == "exact"


@given(st.integers(1, 50), st.sampled_from(["exact", "balanced", "fast"]), st.booleans())
def test_no_request_spends_more_than_its_budget(asked: int, mode: str, may_lose: bool) -> None:
    row = TABLE.row(asked)
    assert row is not None
    most = row.steps(mode)
    fewest = row.fast if may_lose else most
    terms = Terms(mode, asked, fewest, row)
    spent = [terms.spent(steps) for steps in range(fewest, most + 1)]
    assert all(share is not None and 0 <= share <= 1 + 1e-9 for share in spent)
    assert terms.max_loss == pytest.approx(1 - LEAST_SSIM[terms.fidelity(fewest)])
    assert terms.spent(asked) == 0


def test_a_budget_without_a_bound_is_not_given_one() -> None:
    below = Terms("exact", 20, 2, TABLE.row(20))
    assert (below.max_loss, below.fidelity(2), below.spent(2)) == (None, None, None)
    assert (below.fidelity(6), below.spent(6), below.spent(20)) == ("balanced", None, 0.0)
    unknown = Terms("exact", 20, 10)
    assert (unknown.max_loss, unknown.fidelity(19), unknown.spent(20)) == (None, None, 0.0)
    bounded = Terms("exact", 20, 5, TABLE.row(20))
    assert bounded.max_loss == pytest.approx(0.15)
    assert bounded.spent(5) == pytest.approx((1 - 0.88) / 0.15)
    assert bounded.spent(6) == pytest.approx((1 - 0.96) / 0.15)
