"""What the dispatcher knows of workers: who may be called, and who there was in a former life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.leases import Directory, Endpoint, Registration
from tests.fakes import STEP_COST, image_request, poll_of, registration

CONFIG = DispatchConfig(poll_s=1.0, replica_timeout_s=6.0)


def make_core(*configured: str) -> DispatchCore:
    return DispatchCore(config=CONFIG, limits=LimitsConfig(), epoch=1, configured=configured)


def control(replica_id: str, secret: str = "s", name: str = "edges") -> Registration:
    """A ControlNet's worker: others call it, and it leases nothing."""
    return Registration(
        replica_id,
        None,
        max_in_flight=0,
        max_batch=8,
        step_cost=STEP_COST,
        kind="control",
        served_as=name,
        node="n1",
        endpoint=Endpoint("n1:5000", secret),
    )


@pytest.fixture
def core() -> DispatchCore:
    """A core with one base replica."""
    core = make_core("m")
    core.register(registration("r"), 0.0)
    return core


def known(core: DispatchCore, version: str = "") -> Directory | None:
    return core.poll(replace(poll_of(), peers_version=version), 1.0).peers


def test_base_replicas_hear_who_may_be_called_once_for_each_change(core: DispatchCore) -> None:
    assert known(core) is None
    core.register(control("c1"), 0.0)
    first = known(core)
    assert first is not None
    (peer,) = first.named("control", "edges")
    assert (peer.replica_id, peer.node, peer.endpoint) == ("c1", "n1", Endpoint("n1:5000", "s"))
    assert first.named("control", "depth") == ()
    assert known(core, first.version) is None
    core.register(control("c2"), 0.0)
    second = known(core, first.version)
    assert second is not None
    assert [one.replica_id for one in second.named("control", "edges")] == ["c1", "c2"]
    # a worker that comes back under its name listens with another secret
    core.register(control("c2", "t"), 0.0)
    third = known(core, second.version)
    assert third is not None
    core.unregister("c1", 1.0)
    core.unregister("c2", 1.0)
    assert known(core, third.version) == Directory()
    assert known(core, "") is None


def test_a_change_is_news_for_polls_that_are_held(core: DispatchCore) -> None:
    core.poll(poll_of(), 0.0)
    core.replicas.take_alerted()
    core.register(control("c1"), 0.0)
    assert "r" in core.replicas.take_alerted()
    assert core.answer("r", 0.0).peers is not None


def test_a_controlnet_of_a_models_name_leases_none_of_its_images(core: DispatchCore) -> None:
    core.register(control("c", name="m"), 0.0)
    core.offer([image_request("a")], 0.0)
    assert core.poll(poll_of("c"), 0.0).leases == ()
    assert core.models().keys() == {"m"}
    assert len(core.poll(poll_of("r"), 0.0).leases) == 1


def test_models_of_a_former_life_are_known_before_their_replicas_come() -> None:
    slow = replace(registration("old"), load_s=40.0)
    core = make_core("m", "other")
    core.remember([slow, registration("gone", model="removed")], 0.0)
    assert core.models().keys() == {"m"}
    assert core.replicas.starting == ("m",)
    offer = core.offer([image_request("a")], 0.0)
    # its model has to be loaded first
    assert offer.accepted
    alone_s = offer.predicted_s - 40.0
    assert 0 < alone_s < 10
    assert core.offer([image_request("b", model="other")], 0.0).reason == "model_not_ready"
    assert core.offer([image_request("c", model="removed")], 0.0).reason == "unknown_model"
    core.register(registration("new"), 1.0)
    assert core.replicas.starting == ()
    (progress,) = core.progress(["a"], 1.0, predicts="anew")
    assert progress is not None
    assert progress.predicted_s == pytest.approx(alone_s, rel=0.2)


def test_what_is_remembered_takes_nothing_from_who_is_there(core: DispatchCore) -> None:
    before = core.replicas.pool("m")
    core.remember([replace(registration("old"), load_s=40.0)], 0.0)
    assert core.replicas.pool("m") == before
    assert core.replicas.starting == ()


def test_without_a_live_replica_the_next_one_has_to_load_its_model() -> None:
    core = make_core("m")
    core.register(replace(registration("r"), load_s=30.0), 0.0)
    live_s = core.offer([image_request("a")], 0.0).predicted_s
    core.unregister("r", 1.0)
    gone_s = core.offer([image_request("b")], 1.0).predicted_s
    assert gone_s > live_s + 29.0


def test_nobody_is_warned_of_a_model_that_was_removed() -> None:
    core = make_core("other")
    core.register(registration("r"), 0.0)
    assert core.snapshot(0.0).warnings == ()
    core.unregister("r", 1.0)
    assert core.snapshot(1.0).warnings == ()
    assert core.snapshot(1.0).num_waiting_by_model == {}
