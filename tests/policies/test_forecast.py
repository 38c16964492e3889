"""A cell that is followed ends as it does when its policy is asked at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission import forecast, replica_simulation
from ray_cluster.policies.admission.admission import admit
from ray_cluster.policies.admission.forecast import ForecastView, forecast_s
from ray_cluster.policies.admission.replica_simulation import ForecastReplica, Leased
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.leasing.placement import Residency, passed_over, place
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepView
from ray_cluster.policies.types import RequestView, RowView, StepCost, lora_resident
from tests.fakes import replica_view, request_view
from tests.policies.queues import queue_of

COST = StepCost(0.1, 0.3, 0.0, 0.05, 0.03)
BATCH, IN_FLIGHT = 3, 5


def replica_of(held: Sequence[RequestView] = (), **changes: object) -> ForecastReplica:
    return replace(ForecastReplica(COST, BATCH, IN_FLIGHT, held=held), **changes)  # type: ignore[arg-type]


def stepped_one_by_one(
    held: Sequence[RequestView],
    line: Sequence[RequestView],
    cost: StepCost,
    holders: Mapping[str, set[int]] | None = None,
) -> Mapping[str, float]:
    """Ask the policies of the dispatcher and the engine whenever one replica's engine does.

    Args:
        holders: rows of replicas by what is resident there; the one that is stepped is in row 0.
    """
    rows = {one.request_id: RowView(one) for one in held}
    waits, now_s, ends_s = {one.request_id: one for one in line}, 0.0, {}
    there = {need: set(found) for need, found in (holders or {}).items()}
    while rows or waits:
        while waits and len(rows) < IN_FLIGHT:
            placed = place(list(waits.values()), 1, 0, Residency(cost, BATCH, there), now_s)
            for name in placed.passed:
                waits[name] = passed_over(waits[name])
            leased = waits.pop(placed.leased[0])
            rows[leased.request_id] = RowView(leased)
            for need in leased.needs:
                there.setdefault(need, set()).add(0)
        view = StepView(list(rows.values()), cost, BATCH, now_s)
        decision = mixed_batches(view)
        # engines ask again after so many: then a row of a batch of all of them ends
        chosen, num = decision.request_ids, decision.num_rounds
        now_s += num * step_s(cost, work_of(rows[one].request for one in chosen))
        for name, row in list(rows.items()):
            if name not in chosen:
                rows[name] = replace(row, waited_rounds=row.waited_rounds + num)
                continue
            done = replace(row.request, steps_done=row.request.steps_done + num)
            rows[name] = RowView(done)
            if not done.remaining_steps:
                ends_s[name] = now_s
                del rows[name]
    return ends_s


LORAS = st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([256, 512, 1024]), st.floats(0.5, 40)),
    min_size=1,
    max_size=10,
)


@given(REQUESTS)
def test_ends_are_those_of_asking_the_engines_policy_at_every_step(
    kinds: list[tuple[int, int, float]],
) -> None:
    views = [
        request_view(
            f"r{number}", num_steps=steps, width_px=px, height_px=px, deadline_s=at_s, arrival_s=0.0
        )
        for number, (steps, px, at_s) in enumerate(kinds)
    ]
    held, line = views[:IN_FLIGHT], sorted(views[IN_FLIGHT:], key=queue_key)
    truth = stepped_one_by_one(held, line, COST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_simulation, "_ROUNDS", 1)
        patch.setattr(forecast, "_MOST_FINE", 10**9)
        found = forecast_s(ForecastView(0.0, [replica_of(held)], queue=line))
    assert found == pytest.approx(dict(truth))
    # several rounds at once are about the same: the last end is that of all the work
    coarse = forecast_s(ForecastView(0.0, [replica_of(held)], queue=line))
    assert max(coarse.values()) == pytest.approx(max(truth.values()), rel=0.35)


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([256, 512]), st.floats(0.5, 40), LORAS),
        min_size=IN_FLIGHT,
        max_size=14,
    ),
    LORAS,
    LORAS,
)
def test_with_residents_what_waits_is_leased_by_the_dispatchers_own_rule(
    kinds: list[tuple[int, int, float, tuple[str, ...]]],
    here: tuple[str, ...],
    there: tuple[str, ...],
) -> None:
    views = [
        request_view(
            f"r{n}", num_steps=steps, width_px=px, height_px=px, deadline_s=at_s, loras=loras
        )
        for n, (steps, px, at_s, loras) in enumerate(kinds)
    ]
    held, line = views[:IN_FLIGHT], sorted(views[IN_FLIGHT:], key=queue_key)
    needs = {need for one in held for need in one.needs}
    mine = frozenset({*map(lora_resident, here), *needs})
    peers = frozenset(map(lora_resident, there))
    # the peer never has room
    endless = [
        request_view(f"p{n}", num_steps=10**6, deadline_s=math.inf) for n in range(IN_FLIGHT)
    ]
    holders = {need: {0} for need in mine - peers} | {need: {1} for need in peers - mine}
    holders |= {need: {0, 1} for need in mine & peers}
    truth = stepped_one_by_one(held, line, COST, holders)
    scene = ForecastView(
        0.0, [replica_of(held, residents=mine), replica_of(endless, residents=peers)], queue=line
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_simulation, "_ROUNDS", 1)
        patch.setattr(forecast, "_MOST_FINE", 10**9)
        found = forecast_s(scene, views)
    assert {one.request_id: found[one.request_id] for one in views} == pytest.approx(dict(truth))


@pytest.mark.parametrize(("resident", "is_fast"), [("a", False), ("other", True)])
def test_of_idle_replicas_the_one_that_has_the_adapter_takes_a_request(
    resident: str, is_fast: bool
) -> None:
    new = request_view("new", num_steps=5, deadline_s=1e6, loras=("a",))
    fast = replica_of()
    home = replica_of(
        cost=replace(COST, fixed_s=0.2), residents=frozenset({lora_resident(resident)})
    )
    found = forecast_s(ForecastView(0.0, [fast, home], queue=[new]))
    cost = fast.cost if is_fast else home.cost
    assert found["new"] == pytest.approx(5 * step_s(cost, work_of([new])))


def test_a_replica_is_followed_from_its_last_word() -> None:
    one = request_view("a", num_steps=10, deadline_s=1e6)
    each_s = step_s(COST, work_of([one]))
    at_once = forecast_s(ForecastView(0.0, [replica_of([one])]))["a"]
    assert at_once == pytest.approx(10 * each_s)
    told = ForecastView(0.0, [replica_of([one], reported_s=-4 * each_s)])
    assert forecast_s(told)["a"] == pytest.approx(6 * each_s)
    # what should be done by now ends now, and what was leased since begins then
    over = ForecastView(0.0, [replica_of([one], reported_s=-99.0)], rest_s=0.5)
    assert forecast_s(over)["a"] == 0.5
    leased = ForecastView(0.0, [replica_of(leased=[Leased(one, -1.0)])], encode_s=0.25)
    assert forecast_s(leased)["a"] == pytest.approx(10 * each_s - 0.75)


def test_what_waits_goes_to_those_with_the_least_to_do() -> None:
    busy = [request_view(f"b{n}", num_steps=20, deadline_s=1e6) for n in range(2)]
    new = request_view("new", num_steps=5, deadline_s=1e6)
    found = forecast_s(ForecastView(0.0, [replica_of(busy), replica_of()], queue=[new]))
    assert found["new"] == pytest.approx(5 * step_s(COST, work_of([new])))
    # the steps are those of the replica that takes it, whoever stands first
    fast = replica_of(cost=StepCost(0.05, 0.1))
    found = forecast_s(ForecastView(0.0, [replica_of(busy), fast], queue=[new]))
    assert found["new"] == pytest.approx(5 * step_s(fast.cost, work_of([new])))
    full = replica_of(max_in_flight=2, held=busy)
    waits = forecast_s(ForecastView(0.0, [full], queue=[new]))
    assert waits["new"] > waits["b0"]


def test_who_comes_later_takes_a_part_and_is_no_answer() -> None:
    new = request_view("new", num_steps=10, deadline_s=1e6)
    later = [request_view("l", num_steps=10, deadline_s=1e6)]
    quiet = ForecastView(0.0, [replica_of()], queue=[new])
    rush = replace(quiet, later=later, later_every_s=0.5)
    found = forecast_s(rush)
    assert set(found) >= {"new"}
    assert found["new"] > 1.2 * forecast_s(quiet)["new"]
    # a replica that holds all it may is not disturbed by who waits for it
    single = replace(rush, replicas=[replica_of(max_in_flight=1)])
    assert forecast_s(single)["new"] == pytest.approx(forecast_s(quiet)["new"])


def test_nobody_is_let_in_who_would_make_a_leased_request_late() -> None:
    # 10 steps of 1.1 s alone, of 2.1 s together
    leased = request_view("p", deadline_s=13.0)
    replica = replica_view(step_cost=StepCost(0.1, 1.0), max_in_flight=2)
    queue = replace(queue_of(replicas=(replica,)), in_progress=[leased], is_simulated=True)
    new = request_view("new", num_steps=5, deadline_s=8.0, when_late="refuse")
    assert admit([new], queue).reason == "too_late"
    # one that can bear it is left out of some steps
    patient = replace(queue, in_progress=[replace(leased, deadline_s=60.0)], stretch=1.0)
    assert admit([new], patient).accepted
    # one that is late anyway is not made late
    late = replace(queue, in_progress=[replace(leased, deadline_s=9.0)])
    assert admit([new], late).accepted
