"""A group in a forecast serves its requests as its head would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission import group_simulation
from ray_cluster.policies.admission.forecast import (
    ForecastView,
    forecast_s,
    forecasts_within_budget,
)
from ray_cluster.policies.admission.group_simulation import rows_of_decisions
from ray_cluster.policies.admission.replica_simulation import ForecastReplica, Leased
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.sequence_parallel.types import GroupView, RoundDecision
from ray_cluster.policies.types import DegreeCost, GroupCost, RequestView, StepCost
from tests.fakes import request_view

# seconds of a step by degree, whatever the size
STEPS_S = {1: 1.0, 2: 0.6, 4: 0.4}


def group_of(steps_s: Mapping[int, float] = STEPS_S, **changes: Any) -> GroupCost:
    costs = tuple(DegreeCost(degree, StepCost(one, 0.0)) for degree, one in steps_s.items())
    return replace(GroupCost(max(steps_s), costs, token_px=16), **changes)


def replica_of(
    group: GroupCost, held: Sequence[RequestView] = (), **changes: Any
) -> ForecastReplica:
    one = ForecastReplica(group.costs[-1].cost, 1, 8, held=held, group=group)
    return replace(one, **changes)


def requests_of(*deadlines_s: float, **changes: Any) -> list[RequestView]:
    return [
        request_view(f"r{number}", deadline_s=deadline_s, **changes)
        for number, deadline_s in enumerate(deadlines_s)
    ]


def ends_of(
    group: GroupCost, held: Sequence[RequestView], queue: Sequence[RequestView] = (), **view: Any
) -> list[float]:
    """Seconds until each of the requests ends."""
    ends_s = forecast_s(ForecastView(0.0, [replica_of(group, held)], queue=queue, **view))
    return [ends_s[one.request_id] for one in (*held, *queue)]


def test_a_sole_request_takes_all_its_steps_as_fast_as_they_can_be() -> None:
    assert ends_of(group_of(), requests_of(60.0)) == pytest.approx([10 * 0.4])
    assert ends_of(group_of(), requests_of(60.0, steps_done=7)) == pytest.approx([3 * 0.4])
    assert ends_of(group_of(), [], requests_of(60.0), encode_s=0.5) == pytest.approx([4.5])


def test_equal_ones_share_the_ranks_and_one_too_many_waits() -> None:
    alone = group_of({1: 1.0}, num_ranks=3)
    assert ends_of(alone, requests_of(*[60.0] * 4)) == pytest.approx([10.0] * 3 + [20.0])
    assert ends_of(group_of({1: 1.0, 2: 0.6}), requests_of(60.0, 60.0)) == pytest.approx([10, 10])


def test_ranks_that_an_end_frees_make_the_others_faster() -> None:
    short, long = request_view("short", num_steps=4), request_view("long", num_steps=10)
    ends_s = ends_of(group_of({1: 1.0, 2: 0.6}), [short, long])
    assert ends_s == pytest.approx([4.0, 4.0 + 6 * 0.6])
    costly = group_of({1: 1.0, 2: 0.6}, switch_s=0.3)
    assert ends_of(costly, [short, long]) == pytest.approx([4.0, 4.0 + 0.3 + 6 * 0.6])


def test_the_urgent_one_takes_ranks_from_the_one_that_can_wait() -> None:
    patient, urgent = requests_of(60.0, 4.1)
    ends_s = ends_of(group_of(), [patient], [urgent])
    assert ends_s == pytest.approx([8.0, 4.0])


def test_late_ones_are_done_all_the_same_after_those_that_can_be_in_time() -> None:
    late, hopeful = requests_of(0.1, 4.1)
    assert ends_of(group_of(), [late, hopeful]) == pytest.approx([8.0, 4.0])


def test_decoding_and_encoding_keep_no_one_else_from_stepping() -> None:
    cost = StepCost(1.0, 0.0, decode_per_megapixel_s=7.0, encode_per_megapixel_s=2.0)
    group = GroupCost(1, (DegreeCost(1, cost),), token_px=16)
    first, second = requests_of(50.0, 60.0)
    edit = replace(request_view("edit", deadline_s=40.0), num_inputs=1)
    assert ends_of(group, [first, second]) == pytest.approx([17.0, 27.0])
    # the first steps until the edit's image is encoded, and again after it
    assert ends_of(group, [first, edit]) == pytest.approx([20.0 + 7.0, 12.0 + 7.0])


def test_a_request_that_is_only_to_be_decoded_takes_no_rank() -> None:
    cost = StepCost(1.0, 0.0, decode_per_megapixel_s=7.0)
    group = GroupCost(1, (DegreeCost(1, cost),), token_px=16)
    ends_s = ends_of(group, [request_view("done", steps_done=10), request_view("next")])
    assert ends_s == pytest.approx([7.0, 17.0])


def test_it_goes_on_from_its_last_report_and_from_its_leases() -> None:
    held, leased = requests_of(60.0, 60.0)
    replica = replica_of(
        group_of({1: 1.0}, num_ranks=2), [held], reported_s=-3.0, leased=[Leased(leased, -1.0)]
    )
    ends_s = forecast_s(ForecastView(100.0, [replica], encode_s=0.5))
    assert [ends_s["r0"], ends_s["r1"]] == pytest.approx([7.0, 9.5])


def test_no_more_are_leased_than_it_may_hold() -> None:
    replica = replica_of(group_of({1: 1.0}, num_ranks=4), max_in_flight=2)
    ends_s = forecast_s(ForecastView(0.0, [replica], queue=requests_of(*range(60, 64))))
    assert [ends_s[f"r{number}"] for number in range(4)] == pytest.approx([10, 10, 20, 20])


def test_beside_a_plain_replica_each_is_leased_to_that_with_the_least_to_do() -> None:
    plain = ForecastReplica(StepCost(0.7, 0.0), 1, 8)
    view = ForecastView(0.0, [replica_of(group_of()), plain], queue=requests_of(*range(60, 63)))
    ends_s = forecast_s(view)
    # 4 s are left on the group, then 7 s on the other: the third goes to the group
    assert [ends_s[f"r{number}"] for number in range(3)] == pytest.approx([6.0, 7.0, 6.0])


STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(STEPS)
def test_one_rank_serves_as_a_replica_that_steps_one_image_at_once(steps: list[int]) -> None:
    cost = StepCost(0.2, 0.3)
    held = [
        request_view(f"r{number}", num_steps=one, deadline_s=100.0 + number)
        for number, one in enumerate(steps)
    ]
    plain = ForecastReplica(cost, 1, 8, held=held)
    group = replace(plain, group=GroupCost(1, (DegreeCost(1, cost),), token_px=16))
    both = [forecast_s(ForecastView(0.0, [one])) for one in (plain, group)]
    assert max(both[0].values()) == pytest.approx(max(both[1].values()))
    assert both[1] == pytest.approx(
        {one.request_id: sum(steps[: number + 1]) * 0.5 for number, one in enumerate(held)}
    )


@given(STEPS, st.integers(1, 6), st.floats(1.0, 80.0))
def test_all_end_and_none_before_its_fastest(
    steps: list[int], num_ranks: int, deadline_s: float
) -> None:
    group = group_of({k: s for k, s in STEPS_S.items() if k <= num_ranks}, num_ranks=num_ranks)
    held = [
        request_view(f"r{number}", num_steps=one, deadline_s=deadline_s)
        for number, one in enumerate(steps)
    ]
    ends_s = ends_of(group, held)
    fastest_s = group.costs[-1].cost.fixed_s
    assert all(end_s > one * fastest_s - 1e-6 for end_s, one in zip(ends_s, steps, strict=True))
    # ranks are idle only while nobody could use them
    assert max(ends_s) < sum(steps) + 1e-6


@pytest.mark.parametrize("num_held", [8, 96])
def test_what_decisions_may_cost_is_bounded_and_all_end_at_any_number(
    num_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def plan(view: GroupView, options: RoundOptions) -> RoundDecision:
        seen.append(len(view.requests))
        return plan_round(view, options)

    monkeypatch.setattr(group_simulation, "plan_round", plan)
    held = [
        request_view(f"r{number}", num_steps=10 + number, deadline_s=math.inf)
        for number in range(num_held)
    ]
    replica = replica_of(group_of(), held, max_in_flight=num_held)
    assert len(forecast_s(ForecastView(0.0, [replica]))) == num_held
    # what the estimate of a forecast's cost counts with, two for each decision
    counted = rows_of_decisions(num_held, num_held, num_fine=32)
    assert sum(seen) + 2 * len(seen) <= counted <= 32 * 10
    assert (len(seen) == num_held) == (num_held == 8) == (sum(seen) + 2 * len(seen) == counted)


def test_a_group_is_simulated_as_long_as_its_decisions_cost_little() -> None:
    group = replica_of(group_of(), max_in_flight=16)
    plain = ForecastReplica(StepCost(0.7, 0.0), 1, 16)

    def most(*replicas: ForecastReplica) -> int:
        return next(n for n in range(2, 99) if forecasts_within_budget(n, 0, replicas) < 2) - 1

    assert 16 < most(group) < 24 < most(plain)
    assert most(group) < most(group, group)
