import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.steps.checkpointing import (
    MAX_SHARE,
    UNSEEN_FACTOR,
    steps_between_exports,
)

seconds = st.floats(1e-6, 1e3)
shares = st.floats(1e-4, 1.0)


@given(seconds, seconds, shares)
def test_exports_stay_within_their_share_and_no_fewer_steps_would(
    row_step_s: float, export_s: float, max_share: float
) -> None:
    num_steps = steps_between_exports(row_step_s, export_s, max_share=max_share)
    assert num_steps is not None
    assert num_steps >= 1
    # an export for every so many steps of a row, to rounding
    assert UNSEEN_FACTOR * export_s <= max_share * row_step_s * num_steps * (1 + 1e-9)
    if num_steps > 1:
        assert UNSEEN_FACTOR * export_s > max_share * row_step_s * (num_steps - 1) * (1 - 1e-9)


@given(seconds, seconds, st.integers(1, 64))
def test_the_share_of_a_batch_is_that_of_each_of_its_rows(
    step_s: float, export_s: float, batch: int
) -> None:
    num_steps = steps_between_exports(step_s / batch, export_s)
    assert num_steps is not None
    assert batch * UNSEEN_FACTOR * export_s <= MAX_SHARE * step_s * num_steps * (1 + 1e-9)


@given(seconds, seconds, st.floats(1.0, 100.0))
def test_dearer_exports_are_rarer_and_longer_steps_make_them_more_frequent(
    row_step_s: float, export_s: float, factor: float
) -> None:
    num_steps = steps_between_exports(row_step_s, export_s)
    dearer = steps_between_exports(row_step_s, export_s * factor)
    longer = steps_between_exports(row_step_s * factor, export_s)
    assert num_steps is not None
    assert dearer is not None
    assert longer is not None
    assert longer <= num_steps <= dearer


@pytest.mark.parametrize("export_s", [0.0, -1.0])
def test_an_export_that_costs_nothing_is_made_after_every_step(export_s: float) -> None:
    assert steps_between_exports(0.1, export_s) == 1


@pytest.mark.parametrize(
    ("row_step_s", "export_s"), [(0.0, 1.0), (-1.0, 1.0), (5e-324, 1.0), (0.1, math.inf)]
)
def test_without_a_step_time_nothing_is_exported(row_step_s: float, export_s: float) -> None:
    assert steps_between_exports(row_step_s, export_s) is None


def test_a_figure_worked_out_by_hand() -> None:
    # 8 rows in 80 ms may cost 0.1 ms a row; an export of 0.4 ms, that is 0.7, is worth seven steps
    assert steps_between_exports(0.010, 0.00039) == 7
