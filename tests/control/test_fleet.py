"""A fleet and its state, from what a dispatcher shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.control.cell_fleet import (
    Asked,
    Curves,
    fleet_of,
    images_s,
    options_of,
    present_cost,
    share_of,
    state_of,
)
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.controller import (
    ModelQueue,
    Observation,
    ObservedCascade,
    ObservedLimits,
    ObservedPool,
    ObservedReplica,
    ServiceCount,
    TypicalRequest,
)

LIMITS = ObservedLimits(5.0, 60.0, 4, 180.0, dry_run=False)
COST = StepCost(fixed_s=0.1, per_megapixel_s=0.0)
TYPICAL = TypicalRequest(64, 64, 10, uses_guidance=False)
CURVES = Curves(
    QualityCurve((0.0, 0.5, 1.0), (9.0, 5.0, 4.0)), DeferralCurve((0.0, 1.0), (0.0, 1.0))
)


def pool(name: str, **changes: Any) -> ObservedPool:
    values: dict[str, Any] = {
        "kind": "denoise",
        "serves": name,
        "device": "cpu",
        "num_cpus": 0.5,
        "num_gpus": 0.0,
        "load_s": 7.0,
        "step_cost": COST,
        "typical": TYPICAL,
        "max_batch": 6,
    }
    return ObservedPool(pool=name, **(values | changes))


def replica(name: str = "r", age_s: float = 100.0, fixed_s: float = 0.1) -> ObservedReplica:
    return ObservedReplica(name, age_s, 0, 6, replace(COST, fixed_s=fixed_s))


def judge(**changes: Any) -> ObservedPool:
    return pool("judge", kind="score", typical=None, max_batch=16, num_cpus=0.25, **changes)


def cascade(**changes: Any) -> ObservedCascade:
    values: dict[str, Any] = {"threshold": 0.4, "deferral_rate": None, "reserve_s": 0.5}
    return ObservedCascade("auto", "light", "heavy", "judge", curves="curves", **(values | changes))


def seen(*pools: ObservedPool, **changes: Any) -> Observation:
    values: dict[str, Any] = {
        "services": (),
        "models": (),
        "cascades": (),
        "limits": LIMITS,
    }
    return Observation(1e9, 1e9, 60.0, pools=pools, **(values | changes))


def test_batches_are_powers_of_two_and_the_bound() -> None:
    assert [one.batch for one in options_of(pool("m"))] == [1, 2, 3, 4, 6]
    assert [one.batch for one in options_of(pool("m", max_batch=8))] == [1, 2, 3, 4, 6, 8]
    assert [one.batch for one in options_of(pool("m", max_batch=1))] == [1]


def test_a_batch_takes_its_steps_and_its_decoding() -> None:
    cost = StepCost(fixed_s=0.1, per_megapixel_s=2.0, decode_per_megapixel_s=5.0)
    square = TypicalRequest(1000, 1000, 10, uses_guidance=True)
    # three images are six rows of a megapixel
    assert images_s(cost, square, 3) == pytest.approx(10 * (0.1 + 6 * 2.0) + 3 * 5.0)


def test_devices_are_counted_in_hundredths() -> None:
    assert share_of(pool("m")) == 50
    assert share_of(pool("m", device="cuda", num_gpus=0.34)) == 34
    # what reserves nothing is bounded all the same
    assert share_of(pool("m", num_cpus=0.0)) == 1


def test_the_present_cost_is_that_of_the_median_replica() -> None:
    slow, usual, quick = replica("a", fixed_s=0.9), replica("b", fixed_s=0.2), replica("c")
    assert present_cost(pool("m")) == COST
    found = present_cost(pool("m", replicas=(slow, usual, quick)))
    assert found.fixed_s == 0.2


def test_a_model_alone_is_a_service_with_the_bounds_of_its_pools() -> None:
    planned = fleet_of(seen(pool("m", min_replicas=2, max_replicas=3)), lambda _: CURVES)
    (service,), (spec,) = planned.fleet.services, planned.fleet.pools
    assert (service.name, service.model, service.slo_s, service.cascade) == ("m", "m", 60.0, None)
    assert (spec.gpus_per_replica, spec.min_replicas, spec.max_replicas) == (50, 2, 3)
    assert spec.load_s == pytest.approx(12.0)
    assert planned.pools == ("m",)


def test_pools_of_one_model_share_its_demand() -> None:
    both = pool("small", serves="m"), pool("large", serves="m", device="cuda", num_gpus=1.0)
    planned = fleet_of(seen(*both), lambda _: CURVES)
    assert [one.name for one in planned.fleet.services] == ["m"]
    assert [one.device for one in planned.fleet.devices] == ["cpu", "cuda"]


def test_a_cascade_defers_no_more_than_its_settings_say() -> None:
    everything = pool("light"), pool("heavy"), judge()
    given = seen(*everything, cascades=(cascade(),))
    (service,) = fleet_of(given, lambda _: CURVES).fleet.services
    assert service.cascade is not None
    assert (service.name, service.model, service.cascade.heavy_model) == ("auto", "light", "heavy")
    assert service.cascade.quality.best_rate == pytest.approx(0.4)
    # the latest confidences say what the threshold means
    given = seen(*everything, cascades=(cascade(most_deferred=0.7),))
    (service,) = fleet_of(given, lambda _: CURVES).fleet.services
    assert service.cascade is not None
    assert service.cascade.quality.best_rate == pytest.approx(0.7)
    assert service.cascade.quality.score_at(0.7) == pytest.approx(4.6)


def test_a_cascade_of_which_one_model_never_ran_is_planned_as_the_other() -> None:
    planned = fleet_of(seen(pool("light"), cascades=(cascade(),)), lambda _: CURVES)
    assert [(one.name, one.cascade) for one in planned.fleet.services] == [("light", None)]


def test_a_discriminator_answers_what_cascades_route() -> None:
    given = seen(
        *(pool("light"), pool("heavy"), judge()),
        cascades=(cascade(),),
        services=(ServiceCount("auto", 30), ServiceCount("heavy", 4), ServiceCount("light", 2)),
    )
    planned = fleet_of(given, lambda _: CURVES)
    (helper,) = planned.helpers
    # sixteen images in a step of a tenth of a second
    assert (helper.counters, helper.gpus_per_replica) == (("score:judge",), 25)
    assert helper.rate_per_s == pytest.approx(160.0)
    state = state_of(given, planned, supply={"cpu": 400}, targets={})
    auto = state.service("auto")
    assert (auto.num_arrived, auto.num_direct, auto.num_alone) == (36, 4, 2)
    assert state.service("score:judge").num_arrived == 30
    assert state.num_gpus("cpu") == 400


def test_a_controlnet_answers_steps() -> None:
    edges = pool("edges", kind="control", typical=None, max_batch=8)
    given = seen(pool("m"), edges, services=(ServiceCount("control:edges", 70),))
    planned = fleet_of(given, lambda _: CURVES)
    (helper,) = planned.helpers
    assert (helper.counters, helper.rate_per_s) == (("control:edges",), pytest.approx(80.0))
    state = state_of(given, planned, supply={}, targets={})
    assert state.service("control:edges").num_arrived == 70


def test_an_upscaler_answers_images_of_twice_the_side() -> None:
    cost = StepCost(fixed_s=0.0, per_megapixel_s=1.0)
    big = pool("big", kind="upscale", typical=None, max_batch=1, step_cost=cost, callers=("m",))
    given = seen(pool("m"), big, services=(ServiceCount("upscale:big", 9),))
    planned = fleet_of(given, lambda _: CURVES)
    (helper,) = planned.helpers
    megapixels = 4 * TYPICAL.width_px * TYPICAL.height_px / 1e6
    assert helper.counters == ("upscale:big",)
    assert helper.rate_per_s == pytest.approx(1 / megapixels)
    assert [one.pool for one in helper.callers] == ["m"]
    state = state_of(given, planned, supply={}, targets={})
    assert state.service("upscale:big").num_arrived == 9


def test_replicas_load_until_they_are_as_many_as_serve_is_to_keep() -> None:
    old, young = replica("a"), replica("b", age_s=30.0)
    given = seen(
        pool("m", replicas=(old, young)), models=(ModelQueue("m", 5, 3, safety_factor=1.32),)
    )
    planned = fleet_of(given, lambda _: CURVES)
    state = state_of(given, planned, supply={}, targets={"m": 4})
    found = state.pool("m")
    assert (found.num_ready, found.num_loading, found.num_young) == (2, 2, 3)
    assert found.spread == 0.3
    assert (state.model("m").num_waiting, state.model("m").num_in_batches) == (5, 3)
    # one that Serve stops is here until it is gone
    state = state_of(given, planned, supply={}, targets={"m": 1})
    assert (state.pool("m").num_ready, state.pool("m").num_loading) == (2, 0)


def young(given: Observation, target: int, asked: Asked) -> int:
    planned = fleet_of(given, lambda _: CURVES)
    state = state_of(given, planned, supply={}, targets={"m": target}, asked={"m": asked})
    return state.pool("m").num_young


def test_what_a_plan_has_asked_for_stays_a_while_and_what_others_did_does_not() -> None:
    one, two = (
        seen(pool("m", replicas=tuple(replica(f"r{n}") for n in range(number))))
        for number in (1, 2)
    )
    # two were asked for just now, of which one is loading
    assert young(one, 2, Asked(2, at_s=1e9 - 10)) == 2
    # one was stopped just now: the other one stays
    assert young(one, 1, Asked(1, at_s=1e9 - 10)) == 1
    assert young(one, 1, Asked(1, at_s=1e9 - 70)) == 0
    # somebody else has asked for a second one, which loads
    assert young(one, 2, Asked(1)) == 1
    assert young(one, 2, Asked(0)) == 0
    assert young(two, 2, Asked(2)) == 0


def test_leases_that_are_in_no_batch_wait() -> None:
    given = seen(pool("m", replicas=(replica("a"), replica("b"))), models=(ModelQueue("m", 5, 20),))
    planned = fleet_of(given, lambda _: CURVES)
    model = state_of(given, planned, supply={}, targets={}).model("m")
    # each of the two makes six at once
    assert (model.num_waiting, model.num_in_batches) == (13, 12)


def test_a_pool_that_works_is_not_stopped_for_want_of_demand() -> None:
    idle, busy = replica("a"), replace(replica("b"), num_held=1)
    for replicas, fewest in (((idle,), 0), ((idle, busy), 1)):
        planned = fleet_of(seen(pool("m", replicas=replicas, min_replicas=0)), lambda _: CURVES)
        assert planned.fleet.pools[0].min_replicas == fewest
