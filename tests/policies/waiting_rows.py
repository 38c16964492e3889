"""Rows of several sizes that come and go, and how long a step policy lets them wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from ray_cluster.policies.steps.step_policy import StepPolicy, StepView
from ray_cluster.policies.types import RowView, StepCost
from tests.fakes import request_view

SIZES = ((64, 64), (96, 64), (128, 128), (64, 96))
COST = StepCost(0.5, 100.0, per_further_size_s=0.1)

Limits = Mapping[tuple[int, int], int]
Schedule = list[list[tuple[int, int, int, float]]]

limits = st.fixed_dictionaries({size: st.integers(1, 3) for size in SIZES})
# in every round: size, priority, steps and seconds until the deadline of those that join
arrivals = st.lists(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(1, 30), st.floats(-5.0, 60.0)),
        max_size=2,
    ),
    min_size=1,
    max_size=120,
)


def row(request_id: str, size: int = 0, waited_rounds: int = 0, **changes: float) -> RowView:
    width, height = SIZES[size]
    view = request_view(request_id, width_px=width, height_px=height, **changes)
    return RowView(view, waited_rounds)


def sight_of(rows: Sequence[RowView], most: Limits, now_s: float = 0.0) -> StepView:
    return StepView(rows, COST, 9, now_s, most)


def check_waits(
    policy: StepPolicy,
    num_batches: Callable[[StepView], int],
    schedule: Schedule,
    most: Limits,
    *,
    bound: Callable[[int], int],
) -> None:
    """No row waits for as many rounds as the bound says of the largest number of batches."""
    present: dict[str, RowView] = {}
    # per row: the largest number of batches since it last stepped
    largest: dict[str, int] = {}
    for now, joining in enumerate(schedule):
        for index, (size, priority, num_steps, left_s) in enumerate(joining):
            changes = {"priority": priority, "num_steps": num_steps, "deadline_s": now + left_s}
            fresh = row(f"{now}-{index}", size, 0, **changes)
            present[fresh.request.request_id] = fresh
        view = sight_of(list(present.values()), most, float(now))
        batches, decision = num_batches(view), policy(view)
        assert bool(decision.request_ids) == bool(present)
        for request_id, one in list(present.items()):
            largest[request_id] = max(largest.get(request_id, 0), batches)
            if request_id not in decision.request_ids:
                present[request_id] = replace(one, waited_rounds=one.waited_rounds + 1)
                assert one.waited_rounds + 1 < bound(largest[request_id])
                continue
            largest.pop(request_id)
            stepped = replace(one.request, steps_done=one.request.steps_done + 1)
            present[request_id] = RowView(stepped)
            if not stepped.remaining_steps:
                del present[request_id]
