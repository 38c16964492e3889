"""A model without a living replica: what is refused, what ends, and who is not concerned."""

from __future__ import annotations

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.records import Restored
from ray_cluster.requests import Failure
from tests.fakes import image_request, poll_of, registration

CONFIG = DispatchConfig(model_lost_s=60.0, attached_timeout_s=1000.0)


def make_core() -> DispatchCore:
    """A core with a replica of each of two models; the one of "m" dies at 1 s."""
    limits = LimitsConfig(max_queued_images=8)
    core = DispatchCore(config=CONFIG, limits=limits, epoch=1, configured=["m", "n"])
    core.register(registration("r", "m"), 0.0)
    core.register(registration("q", "n"), 0.0)
    core.unregister("r", 1.0)
    return core


def test_its_queue_is_no_other_models() -> None:
    core = make_core()
    offers = [core.offer([image_request(f"a{i}")], 2.0, client=None) for i in range(20)]
    assert [one.accepted for one in offers] == [True] * 8 + [False] * 12
    assert offers[-1].reason == "queue_full"
    assert core.offer([image_request("b", "n")], 2.0, client="b").accepted
    assert len(core.poll(poll_of("q"), 2.0).leases) == 1


def test_it_is_refused_once_it_has_been_lost_for_long() -> None:
    core = make_core()
    assert core.offer([image_request("a")], 60.9).accepted
    assert core.offer([image_request("b")], 61.0).reason == "model_not_ready"
    assert core.offer([image_request("c", "n")], 61.0).accepted
    core.register(registration("r", "m"), 62.0)
    assert core.offer([image_request("d")], 62.0).accepted


def test_calls_for_it_end_and_jobs_wait() -> None:
    core = make_core()
    core.offer([image_request("call")], 2.0, client="a")
    core.offer([image_request("job")], 2.0, client=None)
    assert core.next_event_s() == 6.0
    core.unregister("q", 3.0)
    assert core.next_event_s() == 61.0
    assert core.expire(60.0) == ()
    (outcome,) = core.expire(61.0)
    assert isinstance(outcome, Failure)
    assert (outcome.request_id, outcome.kind) == ("call", "lost")
    assert "has lived for 60 s" in outcome.message
    # nothing is left to do, and the job is still there
    assert core.next_event_s() is None
    assert core.expire(500.0) == ()
    assert core.knows("job")
    core.register(registration("r", "m"), 600.0)
    assert [one.request.request_id for one in core.poll(poll_of(), 600.0).leases] == ["job"]


def test_a_model_that_a_plan_has_stopped_is_not_lost_while_a_controller_starts_it() -> None:
    core = make_core()
    core.queue.note_asleep({"m"}, is_woken=True)
    assert core.offer([image_request("a")], 500.0).accepted
    core.queue.note_asleep((), is_woken=True)
    # its first replica is to come
    assert core.offer([image_request("b")], 501.0).accepted
    core.queue.note_asleep({"m"}, is_woken=False)
    assert core.offer([image_request("c")], 502.0).reason == "model_not_ready"


def test_replicas_of_an_earlier_dispatcher_have_as_long_to_come_back() -> None:
    core = DispatchCore(config=CONFIG, limits=LimitsConfig(), epoch=2, configured=["m"])
    core.remember([registration("r", "m")], 100.0)
    core.restore(Restored(image_request("old"), age_s=1.0, slo_s=60.0), 100.0)
    assert core.offer([image_request("a")], 159.0).accepted
    assert core.offer([image_request("b")], 160.0).reason == "model_not_ready"
