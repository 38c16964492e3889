"""The dispatch core, one promise at a time; `test_dispatch_machine.py` mixes them at random."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.leases import Fence, Finished, Lease
from ray_cluster.protocol.outcomes import Completed
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
    assert (lease.deadline_in_s, lease.queued_s, lease.may_resume) == (2.0, 2.0, False)
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
    assert outcomes == (replace(failed(one).failure, attempts=1),)
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
    assert core.report("nobody", [done], 1.0) == ((), None)
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


def test_a_closed_dispatcher_admits_nothing_and_finishes_what_it_has(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    core.close_admission()
    assert core.offer([image_request("b")], 0.0).reason == "closing"
    [outcome] = core.report("r", [finished(lease_one(core))], 1.0)[0]
    assert isinstance(outcome, Completed)
    assert not core.knows("b")


def test_at_the_end_those_who_wait_hear_that_it_is_not_made_and_the_rest_stays(
    core: DispatchCore,
) -> None:
    core.offer([image_request("waits")], 0.0)
    lease = lease_one(core)
    core.offer([image_request("job")], 0.0, client=None)
    [outcome] = core.end_attached()
    assert isinstance(outcome, Failure)
    assert (outcome.request_id, outcome.kind) == ("waits", "lost")
    assert core.knows("job")
    # its replica hears of it and can do no harm any more
    assert core.report("r", [finished(lease)], 1.0) == ((), ("waits",))


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


def test_progress_shortens_the_prediction_for_the_next_one(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    lease_one(core)
    core.poll(poll_of(steps_done_by_id={"a": 2}), 1.0)
    later_s = core.offer([image_request("b")], 1.0).predicted_s
    core.abort(["b"])
    core.poll(poll_of(num_free=0, steps_done_by_id={"a": 9}), 2.0)
    assert core.offer([image_request("c", priority=1)], 2.0).predicted_s < later_s


def test_a_poll_from_an_earlier_epoch_or_an_unknown_replica_must_register(
    core: DispatchCore,
) -> None:
    core.offer([image_request("a")], 0.0)
    assert not core.poll(poll_of(epoch=0), 0.0).known
    assert not core.poll(poll_of("nobody"), 0.0).known
    assert not core.answer("nobody", 0.0).known
    assert core.num_waiting == 1


def test_the_snapshot_counts_what_is_where(core: DispatchCore) -> None:
    core.offer([image_request(f"a{i}") for i in range(5)], 1.0)
    core.poll(poll_of(num_free=3), 2.0)
    snapshot = core.snapshot(4.0)
    assert (snapshot.num_waiting, snapshot.num_leased) == (2, 3)
    assert snapshot.num_waiting_by_model == {"m": 2}
    assert snapshot.oldest_waiting_s == 3.0
    (replica,) = snapshot.replicas
    assert (replica.num_leased, replica.room) == (3, 0)
    assert replica.leased_work_s > 0
    assert snapshot.warnings == ()
    core.unregister("r", 5.0)
    assert core.snapshot(6.0).warnings == ("no replica of m lives; 5 images wait for one",)
    assert core.snapshot(6.0).num_ready_by_model == {"m": 0}


def test_a_second_look_counts_what_the_first_gave(core: DispatchCore) -> None:
    core.offer([image_request("a"), image_request("b")], 0.0)
    assert len(core.poll(poll_of(num_free=3), 0.0).leases) == 2
    core.offer([image_request("c"), image_request("d")], 0.0)
    assert len(core.answer("r", 0.0).leases) == 1
    assert core.answer("r", 0.0).leases == ()
