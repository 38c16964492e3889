"""What the dispatch core does about silence, death and lost messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.records import Restored
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Lease, Poll, Returned
from ray_cluster.protocol.outcomes import Completed, Progress
from ray_cluster.requests import Failure
from ray_cluster.storage.state_format import StateHeader
from tests.fakes import finished, image_request, poll_of, registration

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
    assert core.report("r", [finished(lost)], 7.6) == ((), None)
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


def test_a_returned_lease_counts_as_no_loss_and_its_steps_stay_done(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    for steps in range(1, 2 * CONFIG.max_attempts):
        lease = lease_one(core, float(steps))
        assert lease.may_resume == (steps > 1)
        assert core.report("r", [Returned("a", lease.fence, steps)], float(steps)) == ((), ())
    lease = lease_one(core, 9.0)
    core.poll(poll_of(steps_done_by_id={"a": 8}), 9.5)
    assert steps_done(core) == 8
    core.register(registration(), 10.0)
    assert steps_done(core) == 5
    lease = lease_one(core, 10.0)
    assert lease.may_resume
    # a replica that adds nothing leaves what was exported before
    core.report("r", [Returned("a", lease.fence, 0)], 11.0)
    assert steps_done(core) == 5
    assert lease_one(core, 11.0).may_resume
    # nor does it lose them while it fetches the state
    core.poll(poll_of(num_free=0, steps_done_by_id={"a": 0}), 11.5)
    assert steps_done(core) == 5
    core.poll(poll_of(num_free=0, steps_done_by_id={"a": 1}), 12.0)
    assert steps_done(core) == 1


def steps_done(core: DispatchCore) -> int:
    progress = core.progress(["a"], 0.0, predicts="anew")[0]
    assert progress is not None
    return progress.steps_done


def test_a_lost_lease_says_that_there_may_be_a_state(core: DispatchCore) -> None:
    core.offer([image_request("a")], 0.0)
    assert not lease_one(core, 0.0).may_resume
    core.register(registration(), 1.0)
    assert lease_one(core, 1.0).may_resume


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
    assert core.poll(poll_of(steps_done_by_id={"old": 3}), 0.0).moved == ()


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
    core.poll(Poll("r", 1, 4, step_cost=StepCost(fixed_s=2.0, per_megapixel_s=0.0)), 0.0)
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


def test_a_replica_goes_on_with_what_was_taken_for_lost(core: DispatchCore) -> None:
    core.offer([image_request("a"), image_request("b")], 0.0)
    leases = {lease.request.request_id: lease for lease in core.poll(poll_of(), 0.0).leases}
    core.expire(7.0)
    assert core.num_waiting == 2
    core.register(registration("s"), 7.0)
    # one of them was given to somebody else meanwhile
    (moved,) = core.poll(poll_of("s", num_free=1), 7.0).leases
    assert moved.request.request_id == "a"
    core.register(registration(), 8.0)
    reply = core.poll(poll_of(num_free=2, steps_done_by_id={"a": 4, "b": 4}), 8.0)
    assert (reply.leases, reply.aborts, reply.adopted.keys()) == ((), ("a",), {"b"})
    assert reply.moved == ("a",)
    assert reply.adopted["b"] > leases["b"].fence
    assert core.report("r", [finished(leases["b"])], 8.0) == ((), ("b",))
    (outcome,), _ = core.report(
        "r", [finished(replace(leases["b"], fence=reply.adopted["b"]))], 9.0
    )
    assert isinstance(outcome, Completed)
    assert outcome.attempts == 1


def test_a_restored_request_keeps_its_age_and_needs_no_client(core: DispatchCore) -> None:
    core.restore(Restored(image_request("old"), age_s=100.0, slo_s=120.0), 1.0)
    core.offer([image_request("new")], 1.0)
    assert core.expire(5.0) == ()
    lease = core.poll(poll_of(num_free=1), 5.0).leases[0]
    assert lease.request.request_id == "old"
    assert lease.deadline_in_s == pytest.approx(16.0)
    # of the time before nobody knows how much was work
    assert lease.queued_s == pytest.approx(4.0)
    assert lease.may_resume
    progress = core.progress(["new"], 0.0, predicts="anew")[0]
    assert progress is not None
    assert (progress.position, progress.steps_done, progress.num_steps) == (0, 0, 10)
    assert progress.predicted_s is not None
    leased = core.progress(["old"], 0.0, predicts="anew")[0]
    assert leased is not None
    assert (leased.position, leased.attempts) == (None, 1)
    assert core.progress(["nobody"], 0.0, predicts="anew")[0] is None


def test_what_is_kept_of_restored_requests_counts_for_predictions(core: DispatchCore) -> None:
    for name in ("far", "near"):
        core.restore(Restored(image_request(name), age_s=1.0, slo_s=120.0), 1.0)
    (lease,) = core.poll(poll_of(num_free=1), 1.0).leases
    assert lease.request.request_id == "far"
    core.report("r", [Returned("far", lease.fence, 0)], 1.0)

    def seen(name: str, now_s: float = 1.0) -> Progress:
        progress = core.progress([name], now_s, predicts="anew")[0]
        assert progress is not None
        return progress

    before_s = seen("near").predicted_s
    core.note_stored(
        {
            name: StateHeader(image_request(name), steps)
            for name, steps in (("far", 8), ("near", 9), ("nobody", 3))
        }
    )
    # who was leased since is told of by a replica
    assert (seen("far").steps_done, seen("near").steps_done) == (0, 9)
    after_s = seen("near", 1.3).predicted_s
    assert before_s is not None
    assert after_s is not None
    assert after_s < before_s
    leases = {one.request.request_id: one for one in core.poll(poll_of(), 2.0).leases}
    assert leases["near"].may_resume
    assert seen("near").steps_done == 9
    core.report("r", [finished(leases["near"]), finished(leases["far"])], 3.0)
    assert core.progress(["near"], 3.0, predicts="no")[0] is None


def test_places_of_a_client_whose_gateway_died_are_freed_by_silence() -> None:
    limits = LimitsConfig(max_attached_images_per_client=10)
    core = DispatchCore(config=CONFIG, limits=limits, epoch=1)
    core.register(registration(max_in_flight=20), 0.0)
    ten = [image_request(f"a{index}") for index in range(10)]
    assert core.offer(ten, 0.0, client="alice").accepted
    refused = core.offer([image_request("b")], 0.0, client="alice")
    assert (refused.reason, refused.limit) == ("client_limit", 10)
    assert refused.retry_after_s > 0
    assert core.offer([image_request("c")], 0.0, client="bob").accepted
    # whoever carried the calls is never heard of again
    core.expire(CONFIG.attached_timeout_s)
    assert core.offer([image_request("b")], CONFIG.attached_timeout_s, client="alice").accepted


def test_steps_of_another_model_are_worth_nothing_to_who_leases_a_request(
    core: DispatchCore,
) -> None:
    request = image_request("a")
    core.restore(Restored(request, age_s=1.0, slo_s=60.0), 0.0)
    core.note_stored({"a": StateHeader(request, 6, model_digest="old")})
    for replica_id, digest, steps_done in (("new", "new", 0), ("old", "old", 0)):
        core.register(replace(registration(replica_id), model_digest=digest), 1.0)
        (lease,) = core.poll(poll_of(replica_id), 1.0).leases
        assert core.progress(["a"], 1.0, predicts="no")[0].steps_done == steps_done
        core.report(replica_id, [Returned("a", lease.fence, 0)], 1.5)
    # the same files again: what is done with them counts
    core.register(replace(registration("r"), model_digest="old"), 2.0)
    (lease,) = core.poll(poll_of(), 2.0).leases
    core.report("r", [Returned("a", lease.fence, 4)], 2.5)
    core.register(replace(registration("s"), model_digest="old"), 3.0)
    (lease,) = core.poll(poll_of("s"), 3.0).leases
    assert core.progress(["a"], 3.0, predicts="no")[0].steps_done == 4
