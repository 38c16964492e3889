"""The dispatch core, one promise at a time; `test_dispatch_machine.py` mixes them at random."""

from __future__ import annotations

import pytest

from ray_cluster.config import DispatchConfig, LimitsConfig
from ray_cluster.dispatch import DispatchCore
from ray_cluster.leases import Completed, Fence, Finished, Lease, Returned
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import Failure
from tests.fakes import failed, finished, image_request, poll_of, registration

CONFIG = DispatchConfig(
    default_slo_s=30.0, poll_s=1.0, replica_timeout_s=6.0, attached_timeout_s=15.0, max_attempts=3
)


def make_core(max_queued_images: int = 8) -> DispatchCore:
    limits = LimitsConfig(max_queued_images=max_queued_images)
    return DispatchCore(config=CONFIG, limits=limits, epoch=1, configured=("m", "cold"))


@pytest.fixture
def core() -> DispatchCore:
    """A core with one live replica that has not polled yet."""
    core = make_core()
    assert core.register(registration(), 0.0) == 1
    return core


def lease_one(core: DispatchCore, now_s: float = 0.0, replica_id: str = "r") -> Lease:
    (lease,) = core.poll(poll_of(replica_id), now_s).leases
    return lease


def ids_of(leases: tuple[Lease, ...]) -> list[str]:
    return [lease.request.request_id for lease in leases]


def test_a_request_is_leased_and_completed_with_its_times(core: DispatchCore) -> None:
    assert core.offer([image_request("a", slo_s=4.0)], 1.0).accepted
    lease = lease_one(core, 3.0)
    assert (lease.deadline_in_s, lease.queued_s, lease.state) == (2.0, 2.0, None)
    (outcome,), stale = core.report("r", [finished(lease)], 7.0)
    assert isinstance(outcome, Completed)
    assert (outcome.slo_s, outcome.elapsed_s, outcome.attempts) == (4.0, 6.0, 1)
    assert not outcome.deadline_met
    assert not stale
    assert not core.knows("a")
    assert core.snapshot(7.0).totals == {"accepted": 1, "completed": 1, "missed": 1}


def test_a_request_without_an_slo_gets_the_default(core: DispatchCore) -> None:
    core.offer([image_request()], 0.0)
    assert lease_one(core, 10.0).deadline_in_s == 20.0


def test_a_failure_ends_its_request_only(core: DispatchCore) -> None:
    core.offer([image_request("a"), image_request("b")], 0.0)
    one, other = core.poll(poll_of(), 0.0).leases
    outcomes, stale = core.report("r", [failed(one)], 1.0)
    assert outcomes == (failed(one).failure,)
    assert not stale
    assert core.knows(other.request.request_id)


def test_a_second_report_under_the_same_fence_is_stale(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    lease = lease_one(core)
    assert core.report("r", [finished(lease), finished(lease)], 1.0)[1] == ("a",)
    assert core.report("r", [failed(lease)], 1.0) == ((), ("a",))


def test_a_report_from_another_replica_or_under_another_fence_is_stale(core: DispatchCore) -> None:
    core.register(registration("s"), 0.0)
    core.offer([image_request("a")], 0.0)
    lease = lease_one(core)
    done = finished(lease)
    forged = Finished("a", Fence(0, lease.fence.counter), done.result)
    assert core.report("s", [done], 1.0) == ((), ("a",))
    assert core.report("r", [forged], 1.0) == ((), ("a",))
    assert core.report("nobody", [done], 1.0) == ((), ("a",))
    assert core.report("r", [done], 1.0)[1] == ()


def test_a_group_is_queued_as_a_whole_or_not_at_all(core: DispatchCore) -> None:
    assert core.offer([image_request(f"a{i}") for i in range(6)], 0.0).accepted
    refused = core.offer([image_request(f"b{i}") for i in range(3)], 0.0)
    assert (refused.accepted, refused.reason) == (False, "queue_full")
    assert core.num_waiting == 6
    assert core.offer([image_request(f"c{i}") for i in range(2)], 0.0).accepted


def test_an_offer_names_every_reason_to_refuse(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    assert core.offer([image_request("a")], 0.0).reason == "duplicate_id"
    assert core.offer([image_request("x"), image_request("x")], 0.0).reason == "duplicate_id"
    assert core.offer([image_request("b", model="cold")], 0.0).reason == "model_not_ready"
    assert core.offer([image_request("b", model="what")], 0.0).reason == "unknown_model"
    assert core.offer([image_request(f"b{i}") for i in range(9)], 0.0).reason == "never_fits"
    with pytest.raises(ValueError, match="one model"):
        core.offer([image_request("b"), image_request("c", model="n")], 0.0)
    assert core.num_waiting == 1


def test_an_id_is_free_again_once_its_request_has_ended(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    core.abort(["a"])
    assert core.offer([image_request("a")], 0.0).accepted


def test_a_late_comer_with_a_higher_priority_overtakes(core: DispatchCore) -> None:
    core.offer([image_request(f"a{i}") for i in range(4)], 0.0)
    core.offer([image_request("urgent", priority=1)], 5.0)
    core.offer([image_request("tight", slo_s=3.0)], 5.0)
    reply = core.poll(poll_of(num_free=3), 5.0)
    assert ids_of(reply.leases) == ["urgent", "tight", "a0"]


def test_an_abort_ends_a_waiting_request_at_once(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    (outcome,) = core.abort(["a", "never-heard-of"])
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("aborted", "queue")
    assert core.poll(poll_of(), 0.0).leases == ()
    assert core.abort(["a"]) == ()


def test_an_abort_of_a_leased_request_reaches_the_replica_and_makes_its_fence_stale(
    core: DispatchCore,
) -> None:
    core.offer([image_request("a")], 0.0)
    lease = lease_one(core)
    core.poll(poll_of(steps_done_by_id={"a": 1}), 0.5)
    (outcome,) = core.abort(["a"])
    assert isinstance(outcome, Failure)
    assert outcome.kind == "aborted"
    assert core.answer("r", 0.6).aborts == ("a",)
    assert core.report("r", [finished(lease)], 0.7) == ((), ("a",))
    assert core.answer("r", 0.8).aborts == ()


def test_an_abort_before_the_replica_has_named_the_lease_reaches_it_with_its_next_poll(
    core: DispatchCore,
) -> None:
    core.offer([image_request("a")], 0.0)
    lease_one(core)
    core.abort(["a"])
    assert core.poll(poll_of(steps_done_by_id={"a": 0}), 0.1).aborts == ("a",)


def test_a_silent_replica_loses_its_leases_to_another(core: DispatchCore) -> None:
    core.register(registration("s"), 0.0)
    core.offer([image_request("a")], 0.0)
    lost = lease_one(core, 1.0)
    core.poll(poll_of("s"), 5.0)
    assert core.expire(6.9) == ()
    assert core.poll(poll_of("s"), 6.9).leases == ()
    assert core.expire(7.0) == ()
    again = lease_one(core, 7.5, "s")
    assert again.fence > lost.fence
    assert again.queued_s == pytest.approx(1.5)
    assert not core.poll(poll_of(), 7.5).known
    assert core.report("r", [finished(lost)], 7.6) == ((), ("a",))
    ((outcome,), _) = core.report("s", [finished(again)], 8.0)
    assert isinstance(outcome, Completed)
    assert outcome.attempts == 2


def test_a_poison_request_ends_as_lost_after_the_last_attempt(core: DispatchCore) -> None:
    core.offer([image_request("poison")], 0.0)
    for death in range(CONFIG.max_attempts):
        now_s = 7.0 * death
        core.touch(["poison"], now_s)
        core.register(registration(), now_s)
        lease_one(core, now_s)
        outcomes = core.expire(now_s + 6.5)
    (outcome,) = outcomes
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("lost", "replica")
    assert core.num_waiting == 0


@pytest.mark.parametrize("how", ["register", "unregister", "poll"])
def test_an_outcome_that_comes_up_elsewhere_can_be_taken(core: DispatchCore, how: str) -> None:
    core.offer([image_request("poison")], 0.0)
    for attempt in range(CONFIG.max_attempts):
        now_s = 3.0 * attempt
        lease_one(core, now_s)
        if how == "poll" and attempt == CONFIG.max_attempts - 1:
            core.poll(poll_of(num_free=0), now_s + 2.5)
            break
        if how == "unregister":
            core.unregister("r", now_s)
        core.register(registration(), now_s)
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert outcome.kind == "lost"
    assert core.take_outcomes() == ()


def test_a_returned_lease_goes_on_from_its_state_and_counts_as_no_loss(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    for steps in range(1, 2 * CONFIG.max_attempts):
        lease = lease_one(core, float(steps))
        event = Returned("a", lease.fence, b"latents %d" % steps, steps)
        assert core.report("r", [event], float(steps)) == ((), ())
    lease = lease_one(core, 9.0)
    assert lease.state == b"latents 5"
    core.register(registration(), 10.0)
    assert lease_one(core, 10.0).state == b"latents 5"


def test_progress_shortens_the_prediction_for_the_next_one(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    lease_one(core)
    core.poll(poll_of(steps_done_by_id={"a": 2}), 0.5)
    later_s = core.offer([image_request("b")], 1.0).predicted_s
    core.poll(poll_of(num_free=0, steps_done_by_id={"a": 9}), 1.5)
    assert core.offer([image_request("c", priority=1)], 2.0).predicted_s < later_s


def test_a_lease_that_the_replica_does_not_name_is_given_again(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    lost = lease_one(core, 0.0)
    assert core.poll(poll_of(), 1.0).leases == ()
    assert core.poll(poll_of(), 2.0).leases == ()
    again = lease_one(core, 2.1)
    assert again.fence > lost.fence
    core.poll(poll_of(steps_done_by_id={"a": 0}), 4.0)
    assert core.poll(poll_of(steps_done_by_id={"a": 1}), 8.0).aborts == ()
    assert core.report("r", [finished(again)], 8.0)[1] == ()


def test_a_row_that_the_replica_has_no_lease_for_is_aborted(core: DispatchCore) -> None:
    assert core.poll(poll_of(steps_done_by_id={"old": 3}), 0.0).aborts == ("old",)


def test_a_poll_from_an_earlier_epoch_or_an_unknown_replica_must_register(
    core: DispatchCore,
) -> None:
    core.offer([image_request("a")], 0.0)
    assert not core.poll(poll_of(epoch=0), 0.0).known
    assert not core.poll(poll_of("nobody"), 0.0).known
    assert not core.answer("nobody", 0.0).known
    assert core.num_waiting == 1


def test_a_client_that_is_gone_frees_its_place(core: DispatchCore) -> None:
    core.offer([image_request("a"), image_request("b")], 0.0)
    core.touch(["b", "unknown"], 10.0)
    assert core.next_event_s() == 6.0
    (outcome,) = core.expire(15.0)
    assert outcome.request_id == "a"
    assert core.expire(15.0) == ()
    assert core.next_event_s() == 25.0


def test_expire_has_something_to_do_exactly_at_the_next_event() -> None:
    core = make_core()
    core.register(registration(), 0.1)
    event_s = core.next_event_s()
    assert event_s is not None
    core.expire(event_s)
    assert core.next_event_s() is None


def test_a_model_whose_replica_died_still_accepts_and_predicts(core: DispatchCore) -> None:
    core.poll(poll_of().__class__("r", 1, 4, {}, StepCost(fixed_s=2.0, per_megapixel_s=0.0)), 0.0)
    core.expire(6.0)
    assert core.snapshot(6.0).replicas == ()
    offer = core.offer([image_request("a")], 7.0)
    assert offer.accepted
    assert offer.predicted_s == pytest.approx(20.0)
    assert core.models().keys() == {"m"}


def test_a_peer_that_stopped_polling_reserves_nothing(core: DispatchCore) -> None:
    core.register(registration("s"), 0.0)
    core.poll(poll_of("s"), 0.0)
    core.offer([image_request(f"a{i}") for i in range(4)], 0.0)
    assert len(core.poll(poll_of(), 0.0).leases) == 2
    held = {"a0": 0, "a1": 0}
    assert core.poll(poll_of(num_free=2, steps_done_by_id=held), 1.0).leases == ()
    assert len(core.poll(poll_of(num_free=2, steps_done_by_id=held), 2.1).leases) == 2


def test_the_snapshot_counts_what_is_where(core: DispatchCore) -> None:
    core.offer([image_request(f"a{i}") for i in range(5)], 1.0)
    core.poll(poll_of(num_free=3), 2.0)
    snapshot = core.snapshot(4.0)
    assert (snapshot.num_waiting, snapshot.num_leased, snapshot.max_waiting) == (2, 3, 8)
    assert snapshot.num_waiting_by_model == {"m": 2}
    assert snapshot.oldest_waiting_s == 3.0
    (replica,) = snapshot.replicas
    assert (replica.num_leased, replica.num_free, replica.silent_s) == (3, 0, 2.0)
    assert replica.leased_work_s > 0
