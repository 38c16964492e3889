"""Random lives of the dispatch core: nothing is lost, doubled or served out of order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.admission.queue_share import MOST_BOUNDS
from ray_cluster.policies.leasing.ordering import QueueKey, queue_key
from ray_cluster.protocol.leases import Lease, PollReply, Returned
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import AddOns, ImageRequest
from tests.fakes import failed, finished, image_request, poll_of, registration

CONFIG = DispatchConfig(
    default_slo_s=30.0,
    poll_s=1.0,
    replica_timeout_s=6.0,
    attached_timeout_s=40.0,
    max_attempts=3,
    model_lost_s=1e6,
    # slots that change hands are tests/dispatch/test_preemption.py's
    preemption=False,
)
BOUND = 6
MODELS = {"r0": "m", "r1": "m", "r2": "n"}
MAX_IN_FLIGHT = 3

HOW = ["finish", "fail", "return"]

replica_ids = st.sampled_from(sorted(MODELS))


class Rows:
    """A replica's own view: what it holds, as far as replies reached it."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.steps_done: dict[str, int] = {}

    def take(self, reply: PollReply) -> None:
        for request_id in reply.aborts:
            self.leases.pop(request_id, None)
        for request_id, fence in reply.adopted.items():
            self.leases[request_id] = replace(self.leases[request_id], fence=fence)
        for lease in reply.leases:
            self.leases[lease.request.request_id] = lease
            self.steps_done[lease.request.request_id] = 0


class DispatchMachine(RuleBasedStateMachine):
    """Gateways, replicas and the network around one core, all of them unreliable."""

    @initialize()
    def start(self) -> None:
        self.core = DispatchCore(
            config=CONFIG, limits=LimitsConfig(max_queued_images=BOUND), epoch=1
        )
        self.now_s = 0.0
        self.num_requests = 0
        self.requests: dict[str, ImageRequest] = {}
        self.clients: dict[str, str] = {}
        self.keys: dict[str, QueueKey] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.ever_leased: set[str] = set()
        # later requests that were leased before each
        self.passes: Counter[str] = Counter()
        # the model of the truth: the newest lease of each request that is leased, and to whom
        self.leased: dict[str, tuple[str, Lease]] = {}
        self.old_leases: list[tuple[str, Lease]] = []
        self.replicas: dict[str, Rows] = {}
        for replica_id in sorted(MODELS):
            self.register(replica_id)

    # what kinds of requests and replicas there are

    def add_ons_of(self, request_id: str) -> AddOns:
        return AddOns()

    def residents_of(self, replica_id: str) -> tuple[str, ...]:
        return ()

    # what the truth says
    @property
    def waiting(self) -> set[str]:
        return self.requests.keys() - self.outcomes.keys() - self.leased.keys()

    def end(self, outcomes: tuple[Outcome, ...]) -> None:
        for outcome in (*outcomes, *self.core.take_outcomes()):
            assert outcome.request_id in self.requests
            assert outcome.request_id not in self.outcomes, "a request ended twice"
            self.outcomes[outcome.request_id] = outcome
            self.unlease(outcome.request_id)

    def unlease(self, request_id: str) -> None:
        if (was := self.leased.pop(request_id, None)) is not None:
            self.old_leases.append(was)

    def drop_leases_of(self, replica_id: str) -> None:
        for request_id, (holder, _) in list(self.leased.items()):
            if holder == replica_id:
                self.unlease(request_id)

    def fits(self, num: int, model: str, client: str) -> bool:
        """Whether so many more fit into a client's share of a model's queue."""
        whose = [self.clients[one] for one in self.waiting if self.requests[one].model == model]
        num_own, num_clients = whose.count(client), len({*whose, client})
        if len(whose) + num > MOST_BOUNDS * BOUND:
            return False
        return not num_own or num_own + num <= BOUND // num_clients

    # what the world does

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 2.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        num=st.integers(1, 4),
        model=st.sampled_from(["m", "n"]),
        priority=st.integers(-1, 1),
        slo_s=st.sampled_from([None, 1.0, 60.0]),
        num_steps=st.integers(1, 40),
        client=st.sampled_from(["", "x", "y"]),
    )
    def offer(
        self, num: int, model: str, priority: int, slo_s: float | None, num_steps: int, client: str
    ) -> None:
        ids = [f"q{self.num_requests + index:03}" for index in range(num)]
        self.num_requests += num
        changes = {"priority": priority, "slo_s": slo_s, "num_steps": num_steps}
        group = [image_request(one, model, add_ons=self.add_ons_of(one), **changes) for one in ids]
        fits = self.fits(num, model, client)
        offer = self.core.offer(group, self.now_s, client=client)
        assert offer.accepted == fits
        assert offer.predicted_s >= 0
        assert offer.retry_after_s >= 0
        if not offer.accepted:
            assert offer.reason == "queue_full"
            return
        for request in group:
            deadline_s = self.now_s + (CONFIG.default_slo_s if slo_s is None else slo_s)
            view = request.view(arrival_s=self.now_s, deadline_s=deadline_s)
            self.requests[request.request_id] = request
            self.clients[request.request_id] = client
            self.keys[request.request_id] = queue_key(view)

    @rule(replica_id=replica_ids, forgets=st.booleans())
    def register(self, replica_id: str, forgets: bool = True) -> None:
        comes = registration(replica_id, MODELS[replica_id], MAX_IN_FLIGHT)
        residents = self.residents_of(replica_id)
        epoch = self.core.register(replace(comes, residents=residents), self.now_s)
        assert epoch == 1
        if forgets or replica_id not in self.replicas:
            self.replicas[replica_id] = Rows()
        self.drop_leases_of(replica_id)
        self.end(())

    @rule(replica_id=replica_ids)
    def unregister(self, replica_id: str) -> None:
        self.core.unregister(replica_id, self.now_s)
        self.drop_leases_of(replica_id)
        self.end(())

    @rule(replica_id=replica_ids, reply_is_lost=st.sampled_from([False, False, False, True]))
    def poll(self, replica_id: str, reply_is_lost: bool) -> None:
        rows = self.replicas[replica_id]
        named = {request_id: rows.steps_done[request_id] for request_id in rows.leases}
        num_free = MAX_IN_FLIGHT - len(named)
        reply = self.core.poll(poll_of(replica_id, num_free, named), self.now_s)
        if not reply.known:
            return
        self.notice_what_was_taken_back(replica_id)
        self.check_adopted(replica_id, reply, named)
        self.check_leases(replica_id, reply, num_free)
        assert set(reply.aborts) == {
            request_id
            for request_id in named
            if self.leased.get(request_id, ("",))[0] != replica_id
            or request_id in {lease.request.request_id for lease in reply.leases}
        }
        gone = self.requests.keys() & self.outcomes.keys()
        assert set(reply.moved) == set(reply.aborts) & self.requests.keys() - gone
        if not reply_is_lost:
            rows.take(reply)
        self.end(())

    def check_adopted(self, replica_id: str, reply: PollReply, named: Iterable[str]) -> None:
        ours = {one for one in self.waiting if self.requests[one].model == MODELS[replica_id]}
        assert reply.adopted.keys() == ours & set(named)
        for request_id, fence in reply.adopted.items():
            assert all(fence > old.fence for _, old in self.old_leases)
            row = self.replicas[replica_id].leases[request_id]
            self.leased[request_id] = (replica_id, replace(row, fence=fence))

    def notice_what_was_taken_back(self, replica_id: str) -> None:
        held = self.core.replicas[replica_id].held
        for request_id, (holder, lease) in list(self.leased.items()):
            if holder != replica_id:
                continue
            record = held.get(request_id)
            if record is None or record.fence != lease.fence:
                assert request_id not in self.replicas[replica_id].leases, "a named lease is kept"
                self.unlease(request_id)
        # what the last attempt of has just been lost is not waiting any more
        self.end(())

    def check_leases(self, replica_id: str, reply: PollReply, num_free: int) -> None:
        assert len(reply.leases) <= max(0, num_free)
        waiting = {one for one in self.waiting if self.requests[one].model == MODELS[replica_id]}
        given = [lease.request.request_id for lease in reply.leases]
        self.check_order(given, sorted(waiting, key=self.keys.__getitem__))
        for lease in reply.leases:
            request_id = lease.request.request_id
            assert all(lease.fence > old.fence for _, old in self.old_leases)
            assert lease.may_resume == (request_id in self.ever_leased)
            self.ever_leased.add(request_id)
            self.leased[request_id] = (replica_id, lease)

    def check_order(self, given: Sequence[str], waiting: Sequence[str]) -> None:
        assert given == waiting[: len(given)], "out of order"

    @rule(replica_id=replica_ids, data=st.data())
    def step(self, replica_id: str, data: st.DataObject) -> None:
        rows = self.replicas[replica_id]
        for request_id in rows.leases:
            rows.steps_done[request_id] += data.draw(st.integers(0, 5))

    @rule(replica_id=replica_ids, how=st.sampled_from(HOW), data=st.data())
    def end_a_row(self, replica_id: str, how: str, data: st.DataObject) -> None:
        rows = self.replicas[replica_id]
        if not rows.leases:
            return
        request_id = data.draw(st.sampled_from(sorted(rows.leases)))
        lease = rows.leases.pop(request_id)
        self.report(replica_id, lease, how)

    @rule(data=st.data(), how=st.sampled_from(HOW))
    def report_under_an_old_fence(self, data: st.DataObject, how: str) -> None:
        if self.old_leases:
            replica_id, lease = data.draw(st.sampled_from(self.old_leases))
            self.report(replica_id, lease, how)

    def report(self, replica_id: str, lease: Lease, how: str) -> None:
        request_id = lease.request.request_id
        event = {
            "finish": finished(lease),
            "fail": failed(lease),
            "return": Returned(request_id, lease.fence, 1),
        }[how]
        is_current = self.leased.get(request_id) == (replica_id, lease)
        outcomes, stale = self.core.report(replica_id, [event], self.now_s)
        if replica_id not in self.core.replicas:
            # a poll may yet have the lease adopted, and the end with it
            assert (outcomes, stale) == ((), None)
            return
        assert stale == (() if is_current else (request_id,))
        assert [one.request_id for one in outcomes] == (
            [request_id] if is_current and how in {"finish", "fail"} else []
        )
        assert all(isinstance(one, Completed) == (how == "finish") for one in outcomes)
        if is_current and how == "return":
            self.unlease(request_id)
        self.end(outcomes)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        ids = data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=3))
        alive = set(ids) - self.outcomes.keys()
        outcomes = self.core.abort(ids)
        assert {one.request_id for one in outcomes} == alive
        self.end(outcomes)

    @rule()
    def clients_touch(self) -> None:
        self.core.touch(self.requests, self.now_s)

    @rule()
    def expire(self) -> None:
        outcomes = self.core.expire(self.now_s)
        for replica_id in MODELS:
            if replica_id not in self.core.replicas:
                self.drop_leases_of(replica_id)
        self.end(outcomes)
        before = self.core.snapshot(self.now_s)
        assert self.core.expire(self.now_s) == ()
        assert self.core.snapshot(self.now_s) == before
        assert (self.core.next_event_s() or math.inf) > self.now_s

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "core"):
            return
        snapshot = self.core.snapshot(self.now_s)
        assert snapshot.num_waiting == len(self.waiting)
        assert snapshot.num_leased == len(self.leased)
        for request_id in self.requests:
            assert self.core.knows(request_id) == (request_id not in self.outcomes)
        held = [request_id for one in self.core.replicas for request_id in one.held]
        assert sorted(held) == sorted(self.leased)
        assert all(one.num_leased <= one.max_in_flight for one in snapshot.replicas)
        assert sum(one.num_leased for one in snapshot.replicas) == len(self.leased)

    def teardown(self) -> None:
        """In the end, with replicas that work, every request that is left is completed."""
        if not hasattr(self, "core"):
            return
        for replica_id in sorted(MODELS):
            self.register(replica_id)
        for _ in range(40):
            self.now_s += 0.1
            for replica_id in sorted(MODELS):
                self.poll(replica_id, reply_is_lost=False)
                for lease in list(self.replicas[replica_id].leases.values()):
                    del self.replicas[replica_id].leases[lease.request.request_id]
                    self.report(replica_id, lease, "finish")
        assert self.outcomes.keys() == self.requests.keys()


TestDispatchMachine = DispatchMachine.TestCase
TestDispatchMachine.settings = settings(stateful_step_count=40)
