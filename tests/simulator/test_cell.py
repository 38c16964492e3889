"""The simulated cell runs the production dispatch core, and loses nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ray_cluster.policies.baselines.image_batches import FixedBatches, take_turns_by_size
from ray_cluster.policies.baselines.one_size_batches import one_size_batches
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepDecision, StepPolicy, StepView
from ray_cluster.policies.types import StepCost
from ray_cluster.simulator.cell.cell import CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.workload import Arrival
from tests.simulator.checked import simulate

COST = StepCost(fixed_s=0.05, per_megapixel_s=0.1, decode_per_megapixel_s=0.2)
POLICIES: tuple[StepPolicy, ...] = (
    one_size_batches,
    mixed_batches,
    take_turns_by_size,
    FixedBatches(3),
    FixedBatches(2, wait_s=1.5),
)


def arrival(at_s: float, side: int = 512, steps: int = 10, slo_s: float = 30.0) -> Arrival:
    return Arrival(at_s, "m", side, side, steps, uses_guidance=False, slo_s=slo_s)


def spec_of(policy: StepPolicy = mixed_batches, num: int = 1, **changes: Any) -> CellSpec:
    hardware = Hardware(COST, encode_s=0.1)
    pool = PoolSpec("p", "m", num, hardware, max_batch=3, max_in_flight=4, policy=policy)
    return CellSpec((replace(pool, **changes),))


arrivals = st.lists(
    st.builds(
        arrival,
        st.floats(0, 20).map(lambda value: round(value, 2)),
        st.sampled_from([256, 512, 1024]),
        st.integers(1, 12),
        st.sampled_from([1.0, 4.0, 60.0]),
    ),
    min_size=1,
    max_size=25,
)


# a noisy step makes the first so late that it no longer holds up the last
NOISE_DECIDES = [arrival(0.0, 1024, 2, 1.0), arrival(0.12, 512, 5, 1.0), arrival(0.0, 512, 9, 1.0)]


def test_an_image_alone_takes_its_encoding_its_steps_and_its_decoding() -> None:
    result, _ = simulate(spec_of(), [arrival(5.0, side=1000, steps=20)])
    assert result.fates[0].end_s == pytest.approx(5 + 0.1 + 20 * 0.15 + 0.2)
    assert result.busy_s_by_replica["p-0"] == pytest.approx(20 * 0.15 + 0.2)


def test_who_joins_a_batch_does_so_at_the_next_step() -> None:
    second_s = 0.1 + 3.5 * 0.15
    _, overseer = simulate(
        spec_of(), [arrival(0.0, side=1000, steps=20), arrival(second_s - 0.1, side=1000, steps=5)]
    )
    first, both, rest = (run for _, run in overseer.runs)
    assert first.request_ids == ("0",)
    assert len(first.ends_s) == 4
    assert sorted(both.request_ids) == ["0", "1"]
    assert both.ends_s[0] - both.start_s == pytest.approx(0.25)
    assert len(both.ends_s) == 5
    assert len(rest.ends_s) == 11


@given(arrivals, st.integers(1, 2), st.sampled_from(["accept", "refuse"]))
def test_places_that_change_hands_cost_no_step(
    workload: list[Arrival], num: int, when_late: Any
) -> None:
    """What holds of every simulation is asserted there: every step is taken just once."""
    spec = replace(spec_of(num=num, max_batch=1, max_in_flight=1), when_late=when_late)
    result, _ = simulate(replace(spec, has_preemption=True), workload)
    if when_late == "refuse":
        made = [one for one in result.fates if one.end == "finished"]
        late_s = [one.end_s - one.arrival.arrival_s - one.arrival.slo_s for one in made]
        # how long encoding takes, and which step is under way, a dispatcher learns afterwards
        assert all(one < 0.1 + 0.16 for one in late_s)


def test_a_place_that_changes_hands_makes_a_draft_in_time_and_the_image_no_later_than_due() -> None:
    long, draft = arrival(0.0, steps=200, slo_s=60.0), arrival(3.0, steps=5, slo_s=3.0)
    spec = replace(spec_of(max_batch=1, max_in_flight=1), when_late="refuse")
    result, overseer = simulate(replace(spec, has_preemption=True), [long, draft])
    assert [one.is_met for one in result.fates] == [True, True]
    assert [run.request_ids for _, run in overseer.runs] == [("0",), ("1",), ("0",)]
    # the draft waits for the step that is being taken, or its encoding; the image is encoded anew
    alone_s = [0.1 + one.num_steps * 0.0762144 + 0.0524288 for one in (long, draft)]
    assert result.fates[1].end_s - 3.0 == pytest.approx(alone_s[1], abs=0.08)
    assert result.fates[0].end_s == pytest.approx(sum(alone_s), abs=0.2)
    result, _ = simulate(spec, [long, draft])
    assert [one.end for one in result.fates] == ["finished", "refused"]


@given(arrivals, st.sampled_from(POLICIES), st.integers(1, 3), st.booleans())
@example(NOISE_DECIDES, mixed_batches, 2, True)
def test_several_steps_in_one_event_are_what_single_steps_are(
    workload: list[Arrival], policy: StepPolicy, num: int, is_noisy: bool
) -> None:
    spec = spec_of(policy, num)
    if is_noisy:
        noisy = replace(spec.pools[0].hardware, noise_cv=0.1)
        spec = replace(spec, pools=(replace(spec.pools[0], hardware=noisy),))
    at_once, seen = simulate(spec, workload)
    one = replace(spec.pools[0], policy=lambda view: replace(policy(view), num_rounds=1))
    one_by_one, single = simulate(replace(spec, pools=(one,)), workload)
    assert [one.end for one in at_once.fates] == [one.end for one in one_by_one.fates]
    ends_s = [one.end_s for one in at_once.fates]
    assert ends_s == pytest.approx([one.end_s for one in one_by_one.fates])
    assert [steps_of(runs) for runs in by_replica(seen.runs)] == [
        steps_of(runs) for runs in by_replica(single.runs)
    ]
    assert len(seen.runs) <= len(single.runs)


def by_replica(runs: Sequence[tuple[str, StepRun]]) -> list[list[StepRun]]:
    return [[run for who, run in runs if who == name] for name in sorted({who for who, _ in runs})]


def steps_of(runs: Sequence[StepRun]) -> list[tuple[str, ...]]:
    return [tuple(sorted(run.request_ids)) for run in runs for _ in run.ends_s]


@given(arrivals, st.integers(1, 3), st.floats(0, 0.5), st.integers(0, 9))
def test_nothing_is_lost_with_failures_noise_and_slow_messages(
    workload: list[Arrival], num: int, one_way_s: float, seed: int
) -> None:
    spec = spec_of(
        mixed_batches,
        num,
        hardware=Hardware(COST, encode_s=0.1, noise_cv=0.2, load_s=2.0),
        mtbf_s=15.0,
        repair_s=1.0,
    )
    spec = replace(spec, one_way_s=one_way_s, seed=seed)
    result, _ = simulate(spec, workload)
    again, _ = simulate(spec, workload)
    assert result.fates == again.fates
    assert {fate.end for fate in result.fates} <= {"finished", "failed"}


def test_a_replica_that_dies_loses_its_work_and_another_makes_it_again() -> None:
    spec = replace(spec_of(num=2, mtbf_s=6.0, repair_s=1.0), seed=3)
    workload = [arrival(0.2 * number, steps=40) for number in range(10)]
    result, overseer = simulate(spec, workload)
    assert result.totals["finished"] == 10
    assert max(fate.attempts for fate in result.fates) > 1
    assert sum(overseer.steps_by_id.values()) > 400
    safe, _ = simulate(spec_of(num=2), workload)
    assert safe.end_s < result.end_s


def test_messages_that_take_time_delay_an_image_by_both_ways() -> None:
    near, _ = simulate(spec_of(), [arrival(0.0)])
    far, _ = simulate(replace(spec_of(), one_way_s=0.3), [arrival(0.0)])
    assert far.fates[0].end_s == pytest.approx(near.fates[0].end_s + 0.6)


def test_requests_that_would_be_late_are_refused_where_that_is_wished_and_count_as_missed() -> None:
    workload = [arrival(0.4 * number, steps=20, slo_s=6.0) for number in range(60)]
    late, _ = simulate(spec_of(), workload)
    refusing, _ = simulate(replace(spec_of(), when_late="refuse"), workload)
    assert late.totals["refused"] == 0
    assert refusing.totals["refused"] > 10
    assert refusing.attainment > late.attainment + 0.1
    assert refusing.attainment_by_class() == {"default": refusing.attainment}


def test_consent_to_fewer_steps_is_used_where_it_brings_a_request_in_time() -> None:
    workload = [
        replace(arrival(0.25 * number, steps=20, slo_s=5.0), fewest_steps=5) for number in range(60)
    ]
    spec = replace(spec_of(), when_late="refuse")
    willing, _ = simulate(spec, workload)
    strict, _ = simulate(spec, [replace(one, fewest_steps=None) for one in workload])
    assert willing.attainment > strict.attainment
    steps = {fate.num_steps for fate in willing.fates if fate.end == "finished"}
    assert min(steps) >= 5
    assert len(steps) > 2


def test_without_deadlines_requests_are_served_as_they_come() -> None:
    workload = [arrival(0.0), arrival(0.1), arrival(0.2, slo_s=3.0)]
    spec = spec_of(FixedBatches(1), max_in_flight=1)
    told, _ = simulate(spec, workload)
    untold, _ = simulate(replace(spec, promises_deadlines=False), workload)
    assert told.fates[2].end_s < told.fates[1].end_s
    assert untold.fates[1].end_s < untold.fates[2].end_s
    # the count of the missed knows the deadline all the same
    assert [fate.is_met for fate in untold.fates] == [True, True, untold.fates[2].end_s <= 3.2]


def test_a_request_of_a_model_that_nobody_serves_is_refused() -> None:
    result, _ = simulate(spec_of(), [replace(arrival(1.0), model="other")])
    assert result.totals == {"refused": 1}
    assert result.attainment == 0
    nothing, _ = simulate(spec_of(), [])
    assert nothing.attainment == 1
    assert math.isfinite(nothing.end_s)


def test_a_dead_replica_is_noticed_however_slow_its_last_words_are() -> None:
    late = []

    class Watched(SimulatedCell):
        def _fail(self, pool: PoolSpec, name: str) -> None:
            super()._fail(pool, name)
            # six seconds of silence, and its last words
            self.events.after(6.0 + 0.4 + 0.2, lambda: late.append(name in self.core.replicas))

    spec = replace(spec_of(num=4, mtbf_s=20.0, repair_s=400.0), one_way_s=0.4)
    Watched(spec).run([arrival(0.3 * number, slo_s=1000.0) for number in range(300)])
    assert len(late) >= 4
    assert not any(late)


def test_what_is_ready_at_the_very_instant_of_an_alarm_is_decided_over_once() -> None:
    spec = spec_of(FixedBatches(2, wait_s=1.5))
    # the first waits until 1.6 s, when the encoding of the last one ends
    workload = [arrival(0.1, side=256), arrival(1.4), arrival(1.5, side=256)]
    _, overseer = simulate(spec, workload)
    assert [run.request_ids for _, run in overseer.runs] == [("0", "2"), ("1",)]


def test_a_run_ends_though_an_accepted_request_never_does() -> None:
    def never(view: StepView) -> StepDecision:
        return StepDecision()

    cell = SimulatedCell(spec_of(never))
    result = cell.run([arrival(1.0), arrival(2.0)])
    assert [fate.end for fate in result.fates] == ["open", "open"]
    assert (result.attainment, result.totals["open"]) == (0.0, 2)
