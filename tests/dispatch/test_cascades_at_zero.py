"""A heavy model without a replica: images wait for one that a plan starts, and for no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.leases import Registration
from tests.dispatch.cascade_core import deferred, lease, make_core, only, routed, score_of
from tests.fakes import registration

LOAD_S = 12.0


def heavy() -> Registration:
    return replace(registration("h", "heavy"), load_s=LOAD_S)


def without_heavy(*, stopped_by_plan: bool, is_woken: bool = True) -> DispatchCore:
    """A cell whose heavy model has had a replica."""
    core = make_core()
    core.unregister("h", 0.0)
    core.register(heavy(), 0.0)
    core.unregister("h", 0.0)
    core.queue.note_asleep(["heavy"] if stopped_by_plan else [], is_woken=is_woken)
    return core


def test_an_image_waits_for_a_replica_that_a_controller_starts() -> None:
    core = without_heavy(stopped_by_plan=True)
    deferred(core, routed())
    (progress,) = core.progress(["a"], 1.5, predicts="anew")
    assert progress is not None
    assert progress.predicted_s == pytest.approx(LOAD_S + 1.0, abs=0.5)
    core.register(heavy(), 14.0)
    assert lease(core, "h", 14.0).request.request_id == "a"


def test_a_model_at_none_is_missing_only_where_nobody_starts_it_again() -> None:
    for stopped, wanted in ((False, 0), (True, None)):
        found = without_heavy(stopped_by_plan=stopped).snapshot(1.0).num_ready_by_model
        assert found.get("heavy") == wanted
        assert found["light"] == 1


def test_so_it_does_while_that_one_loads() -> None:
    core = without_heavy(stopped_by_plan=True)
    core.queue.note_asleep([], is_woken=True)
    # however many rounds that takes
    core.queue.note_asleep([], is_woken=True)
    deferred(core, routed())
    # a plan that gives it up again, and one that starts it again
    core.queue.note_asleep(["heavy"], is_woken=True)
    assert score_of(core, routed("b"), 0.1, now_s=2.0) == ()


def test_it_does_not_where_the_load_takes_too_long() -> None:
    core = without_heavy(stopped_by_plan=True)
    outcome = only(score_of(core, routed(slo_s=LOAD_S + 2.0), 0.1, now_s=0.0))
    assert outcome.cascade is not None
    assert (outcome.cascade.stage, outcome.cascade.reason) == ("light", "no_time")


@pytest.mark.parametrize(("stopped_by_plan", "is_woken"), [(False, True), (True, False)])
def test_nobody_waits_for_a_replica_that_nobody_starts(
    stopped_by_plan: bool, is_woken: bool
) -> None:
    core = without_heavy(stopped_by_plan=stopped_by_plan, is_woken=is_woken)
    outcome = only(score_of(core, routed(), 0.1, now_s=0.0))
    assert outcome.cascade is not None
    assert (outcome.cascade.stage, outcome.cascade.reason) == ("light", "no_time")


def test_a_replica_that_came_and_died_is_not_counted_on() -> None:
    core = without_heavy(stopped_by_plan=True)
    core.queue.note_asleep([], is_woken=True)
    core.register(heavy(), 0.0)
    core.queue.note_asleep([], is_woken=True)
    core.unregister("h", 0.0)
    assert only(score_of(core, routed(), 0.1, now_s=0.0)).cascade is not None
