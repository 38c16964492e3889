"""The simulated part of the controller's benchmark: a cell as the live one was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.serving.controller_policies import costs_of, ours
from benchmarks.serving.controller_service import HEAVY, LIGHT
from benchmarks.serving.controller_simulated import simulate
from benchmarks.serving.controller_trace import violations
from benchmarks.serving.controller_watch import (
    Round,
    SlotPlanner,
    curves_of,
    diffserve,
    in_slots,
)
from ray_cluster.control.cell_fleet import fleet_of, state_of
from ray_cluster.control.records import Glance
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.controller import ModelQueue, ObservedReplica
from tests.benchmarks.controlled_cell import JUDGE, day, observation, rounds


def test_another_policy_plans_in_replicas_and_keeps_the_discriminator() -> None:
    seen = observation(num_heavy=2)
    planned = fleet_of(seen, curves_of)
    state = state_of(seen, planned, supply={"cpu": 200}, targets={HEAVY: 2, LIGHT: 1, JUDGE: 1})
    assert in_slots(state, planned).devices[0].num_gpus == 3
    glance = Glance(seen, planned, state)
    planner = SlotPlanner(
        lambda: glance, lambda fleet: diffserve(fleet, {"smoothing": 0.5, "demand_factor": 1.05})
    )
    memory = planner.begin(state)
    plan, _ = planner.plan(replace(state, now_s=state.now_s + 2), memory)
    assert {one.pool: one.num_replicas for one in plan.pools} == {HEAVY: 2, LIGHT: 1, JUDGE: 1}


def test_costs_are_those_of_the_live_cell_with_what_replicas_reserve() -> None:
    costs = costs_of(rounds())
    assert (costs.supply, costs.num_slots) == (175, 3)
    assert [one.gpus_per_replica for one in costs.fleet.pools] == [50, 50]
    assert [one.model for one in costs.fleet.pools] == [LIGHT, HEAVY]
    assert costs.image_s(HEAVY) == pytest.approx(0.3, rel=0.01)
    [service] = costs.fleet.services
    assert service.cascade is not None
    assert (service.slo_s, service.cascade.num_scorers) == (2.0, 1)
    assert 0 < service.cascade.discriminate_s < 0.02
    with pytest.raises(ValueError, match="both models"):
        costs_of([])


def test_a_simulated_cell_is_as_slow_as_the_live_one_was_while_it_made_images() -> None:
    """Steps learnt to take longer, and images that took longer than predicted by them."""

    def busy(one: Round, num_leased: int, slower: float, safety_factor: float) -> Round:
        pools = tuple(
            replace(pool, replicas=tuple(replace(r, step_cost=scaled(r, slower)) for r in live))
            if (live := pool.replicas) and pool.pool == HEAVY
            else pool
            for pool in one.seen.pools
        )
        queue = ModelQueue(HEAVY, 0, num_leased, safety_factor=safety_factor)
        return replace(one, seen=replace(one.seen, pools=pools, models=(ModelQueue(LIGHT), queue)))

    def scaled(one: ObservedReplica, slower: float) -> StepCost:
        cost = one.step_cost
        return replace(
            cost, fixed_s=slower * cost.fixed_s, per_megapixel_s=slower * cost.per_megapixel_s
        )

    idle, first, last = rounds()
    costs = costs_of([idle, busy(first, 0, 1.0, 1.2), busy(last, 2, 1.5, 1.1)])
    assert costs.paces == {LIGHT: 1.0, HEAVY: pytest.approx(1.5 * 1.1)}
    ratios = [
        slow.options[0].seconds / fast.options[0].seconds
        for slow, fast in zip(costs.as_it_ran.pools, costs.fleet.pools, strict=True)
    ]
    assert ratios == pytest.approx([1.0, 1.65])
    assert costs_of(rounds()).paces == {LIGHT: 1.0, HEAVY: 1.0}


def test_a_simulated_day_has_an_answer_for_every_call() -> None:
    one = day()
    run = simulate(costs_of(rounds()), ours(costs_of(rounds()), 0.5), one)
    assert [made.at_s for made in run.answers] == list(one.trace.instants_s)
    assert np.mean(violations(run.answers)) < 0.03
    assert {made.stage for made in run.answers} == {"light", "heavy"}
    assert 50 < run.core_s < 1.75 * 60 + 1
