"""The controller is shown counters, queues, workers and bounds as the dispatch core has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.config.slices import registered, worker_arguments
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.reports.observing import InForce, Instant, observe
from ray_cluster.protocol.controller import Observation, TypicalRequest
from ray_cluster.protocol.leases import Registration
from ray_cluster.requests import CascadeUse
from tests.dispatch.cascade_core import (
    CONFIG,
    STAGE,
    cascade,
    lease,
    made,
    make_core,
    routed,
    scored,
    scorer,
    up_to_score,
)
from tests.fakes import image_request, poll_of, registration


def configured(**heavy: Any) -> ClusterConfig:
    """The configuration of :func:`make_core`'s cell, with changes of its heavy pool."""
    pools = [
        {"name": f"{name}-pool", "model": "shapes-sd", "served_as": name, "num_cpus": 0.5}
        for name in ("light", "heavy")
    ]
    return ClusterConfig.model_validate(
        {
            "pools": [pools[0], pools[1] | heavy],
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [cascade()],
            "dispatch": CONFIG.model_dump(),
        }
    )


CELL = configured(max_batch=3, min_replicas=1, max_replicas=4, defaults={"guidance_scale": 1.0})


def known(config: ClusterConfig) -> dict[str, Registration]:
    """What the last workers of the cell have registered."""
    models = {
        f"{name}-pool": replace(
            registration(name[0], name),
            pool=f"{name}-pool",
            load_s=7.0,
            arguments=registered(worker_arguments(config, f"{name}-pool").own),
        )
        for name in ("light", "heavy")
    }
    given = registered(worker_arguments(config, "judge").own)
    return models | {"judge": replace(scorer(), pool="judge", arguments=given)}


def seen(core: DispatchCore, now_s: float = 0.0, **cursors: int) -> Observation:
    in_force = InForce(settings_of(CELL), started_s=1e9)
    return observe(core, in_force, known(CELL), cursors, Instant(now_s, 1e9 + now_s))


def test_requests_count_for_the_cascade_that_routes_them_or_the_model_that_makes_them() -> None:
    core = make_core(max_queued=2)
    core.apply(settings_of(CELL), 0.0)
    direct = CascadeUse("auto", entry="heavy", reason="quality")
    core.offer([routed("a"), routed("b")], 0.0)
    core.offer([image_request("c", "heavy", cascade=direct)], 0.0)
    core.offer([image_request("d", "light", guidance_scale=3.0)], 0.0)
    # a repeated id is no demand
    assert core.offer([image_request("d", "light")], 0.0).reason == "duplicate_id"
    found = seen(core)
    assert {one.name: (one.num_accepted, one.num_unmet) for one in found.services} == {
        "auto": (2, 0),
        "heavy": (1, 0),
        "light": (1, 0),
    }
    assert found.num_wanted("nobody's") == 0


def test_queues_are_those_of_each_model() -> None:
    core = make_core()
    core.offer([routed("a"), routed("b")], 0.0)
    core.offer([image_request("c", "heavy")], 0.0)
    core.poll(poll_of("l", num_free=1), 1.0)
    found = seen(core)
    light, heavy = found.queue("light"), found.queue("heavy")
    assert (light.num_waiting, light.num_leased) == (1, 1)
    assert (heavy.num_waiting, heavy.num_leased) == (1, 0)
    assert heavy.safety_factor > 0


def test_pools_have_their_bounds_and_what_a_replica_reserves() -> None:
    pools = {one.pool: one for one in seen(make_core()).pools}
    assert list(pools) == ["light-pool", "heavy-pool", "judge"]
    heavy = pools["heavy-pool"]
    assert (heavy.max_batch, heavy.min_replicas, heavy.max_replicas) == (3, 1, 4)
    assert (heavy.device, heavy.num_cpus, heavy.num_gpus, heavy.load_s) == ("cpu", 0.5, 0.0, 7.0)
    # guidance only where the pool's defaults do not turn it off
    assert heavy.typical == TypicalRequest(64, 64, 10, uses_guidance=False)
    assert pools["light-pool"].typical == TypicalRequest(64, 64, 10, uses_guidance=True)
    judge = pools["judge"]
    assert (judge.kind, judge.serves, judge.typical, judge.max_batch) == (
        "score",
        "judge",
        None,
        16,
    )


def test_a_pool_without_any_worker_so_far_is_not_shown() -> None:
    settings = settings_of(CELL)
    found = observe(make_core(), InForce(settings, 0.0), {}, {}, Instant(0.0, 0.0))
    assert found.pools == ()
    assert [one.name for one in found.cascades] == ["auto"]


def test_replicas_have_an_age_and_their_present_cost() -> None:
    core = make_core()
    worker = known(CELL)["heavy-pool"]
    core.register(worker, 10.0)
    cost = replace(worker.step_cost, fixed_s=0.7)
    core.poll(replace(poll_of("h"), step_cost=cost, settings_version="v"), 11.0)
    (pool,) = (one for one in seen(core, 14.0).pools if one.pool == "heavy-pool")
    (replica,) = pool.replicas
    assert replica.replica_id == "h"
    assert replica.age_s == pytest.approx(4.0)
    assert (replica.step_cost.fixed_s, replica.settings_version) == (0.7, "v")
    # it has come back: its age counts anew
    core.register(worker, 20.0)
    assert {one.replica_id: one.age_s for one in seen(core, 21.0).pools[1].replicas} == {"h": 1.0}


def score_one(core: DispatchCore, name: str, confidence: float) -> None:
    core.report("s0", [scored(up_to_score(core, routed(name)), confidence)], 2.0)
    if confidence < 0.6:
        core.report("h", [made(lease(core, "h", 2.0))], 3.0)


def test_each_confidence_is_shown_once() -> None:
    core = make_core()
    score_one(core, "a", 0.9)
    score_one(core, "b", 0.25)
    (first,) = seen(core).cascades
    assert (first.num_scored, first.confidences) == (2, (0.9, 0.25))
    assert seen(core, auto=2).cascades[0].confidences == ()
    score_one(core, "c", 0.7)
    (later,) = seen(core, auto=2).cascades
    assert (later.num_scored, later.confidences) == (3, (0.7,))
    # a cursor of an earlier dispatcher: all of them are new
    assert seen(core, auto=99).cascades[0].confidences == (0.9, 0.25, 0.7)


def test_steps_that_ask_for_a_controlnet_are_counted() -> None:
    from ray_cluster.requests import AddOns, BlobRef, ControlNetUse

    core = make_core()
    used = AddOns(controls=(ControlNetUse("edges", BlobRef("0" * 64, 9)),))
    core.offer([image_request("a", "heavy", num_steps=7, add_ons=used)], 0.0)
    assert seen(core).num_accepted("control:edges") == 7
    assert STAGE.discriminator == "judge"


def test_a_pipeline_makes_one_image_a_call_whatever_the_settings_say() -> None:
    core = make_core()
    core.apply(settings_of(CELL), 0.0)
    last = known(CELL)
    heavy = last["heavy-pool"]
    assert heavy.profile is not None
    called = replace(heavy, max_batch=1, profile=replace(heavy.profile, engine="diffusers"))
    in_force = InForce(settings_of(CELL), started_s=1e9)
    for registered_now, batch in ((heavy, 3), (called, 1)):
        pools = last | {"heavy-pool": registered_now}
        found = observe(core, in_force, pools, {}, Instant(0.0, 1e9)).pools
        assert {one.pool: one.max_batch for one in found}["heavy-pool"] == batch
