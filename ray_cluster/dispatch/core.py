"""The dispatch core: owns the waiting queue and all leases, and asks the policies.

Free of Ray, torch, threads and clocks: every method takes the present instant, so that the
dispatcher and the simulator run the same decisions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.attached import Attached
from ray_cluster.dispatch.cascades.advance import Cascades, CurveOf
from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.dispatch.predictions import Predictions, Predicts
from ray_cluster.dispatch.queue.admission import Admission
from ray_cluster.dispatch.queue.admission_view import AdmissionView
from ray_cluster.dispatch.queue.exchanges import Exchanges
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.queue.unserved import Unserved
from ray_cluster.dispatch.records import ReplicaRecord, Restored
from ray_cluster.dispatch.reports.demand import Capacities, Demand
from ray_cluster.dispatch.reports.snapshots import ClusterSnapshot
from ray_cluster.dispatch.workers.controlnets import ControlNets
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.policies.types import Offer, RequestView
from ray_cluster.protocol.leases import Poll, PollReply, Registration, ReplicaEvent, Shown, lanes_of
from ray_cluster.protocol.outcomes import Deferred, Outcome, Preview, Progress
from ray_cluster.protocol.settings import WorkerSettings, worker_settings
from ray_cluster.requests import ImageRequest, ModelProfile
from ray_cluster.storage.state_format import StateHeader

# polls within which a replica must name a lease, and a peer is expected to poll
GRACE_POLLS = 2
# a live replica polls at least this often within the silence that counts as death
POLLS_PER_TIMEOUT = 3
_NOTHING_TO_SAY = PollReply(known=True)


class DispatchCore:
    """Admits requests, leases them to replicas, and sees each one to exactly one outcome.

    A request waits or is leased until it ends; then it is forgotten and its outcome is handed to
    the caller. ``report``, ``abort`` and ``expire`` return the outcomes since the last such call.
    ``register``, ``unregister`` and ``poll`` can also end a request, whose last attempt turns out
    to be lost: :meth:`take_outcomes` returns those.

    Attributes:
        replicas: the live ones; read only.
        queue: the cell as admission sees it.
        cascades: what follows on stages; settings reach it through :meth:`apply`.
        hold_s: seconds for which a poll may be held open.
        grace_s: seconds within which a live replica polls and names what it was leased.
        stands_by: whether another cell's dispatcher knows what replicas may have from before.

    Args:
        epoch: names this dispatcher's life; later lives have larger epochs.
        configured: models that are "not ready" rather than "unknown" before their first replica
            registers.
        curve_of: see :class:`Cascades`.
    """

    def __init__(
        self,
        *,
        config: DispatchConfig,
        limits: LimitsConfig,
        epoch: int,
        configured: Collection[str] = (),
        curve_of: CurveOf = lambda _config: None,
    ) -> None:
        self._epoch = epoch
        self._settings: Settings | None = None
        # of which a replica has asked for its settings
        self.started_pools: set[str] = set()
        self._expected: set[str] = set()
        # that go on in another cell
        self._departed: set[str] = set()
        self.stands_by = False
        self.replicas = Replicas()
        self.loras = Loras(self.replicas.base_model)
        self.controls = ControlNets(self.replicas)
        self._capacities = Capacities(self.replicas)
        demand = Demand(self._capacities)
        self._ledger = Ledger(config, self.loras, self.controls, demand, epoch=epoch)
        self._attached = Attached(self._ledger, self.replicas, config.attached_timeout_s)
        self.queue = AdmissionView(self._ledger, self.replicas, frozenset(configured))
        self._predictions = Predictions(self._ledger, self.queue)
        self._exchanges = Exchanges(self._ledger, self.replicas)
        self.cascades = Cascades(self._ledger, self.replicas, self.queue, curve_of)
        self._admission = Admission(
            self._ledger, self.queue, self.cascades, self._attached, self._exchanges
        )
        self._unserved = Unserved(self._ledger, self.replicas, self.queue, self._admission)
        self._set(config, limits)

    def _set(self, config: DispatchConfig, limits: LimitsConfig) -> None:
        self._config = config
        self.hold_s = min(config.poll_s, config.replica_timeout_s / POLLS_PER_TIMEOUT)
        self.grace_s = GRACE_POLLS * self.hold_s
        self._exchanges.again_s = self.grace_s
        self._attached.timeout_s = config.attached_timeout_s
        self._admission.apply(config, limits)
        self._unserved.lost_s = config.model_lost_s

    def apply(self, settings: Settings, now_s: float) -> None:
        """Apply other settings; what was accepted stays accepted.

        The caller ends held polls and clients' waits afterwards, which have the times of before.
        """
        is_retimed = settings.dispatch != self._config
        self._settings = settings
        served = lanes_of(settings)
        removed = self._admission.removed | frozenset(self.queue.configured)
        self._admission.removed = removed - served
        self.queue.configured = served
        self._set(settings.dispatch, settings.limits)
        self._capacities.apply(settings)
        self.cascades.apply(settings.cascades)
        self.controls.apply(settings.controlnets)
        self.advance_held_back(now_s)
        if is_retimed:
            self._ledger.apply_settings(settings.dispatch)
            # silences count from now on
            self._attached.touch_all(now_s)
            for replica in self.replicas:
                self.replicas.note_heard(replica, now_s)

    def worker_settings(self, pool: str) -> WorkerSettings | None:
        """Return the settings of a pool's replicas; None if the settings have no such pool."""
        self.started_pools.add(pool)
        return None if self._settings is None else worker_settings(self._settings, pool)

    def hold_s_for(self, replica_id: str) -> float:
        """Seconds for which a replica's poll may be held: less while it works on jobs."""
        replica = self.replicas.get(replica_id)
        is_watched = replica is not None and any(
            record.client_s is None for record in replica.held.values()
        )
        return min(self.hold_s, self._config.progress_s) if is_watched else self.hold_s

    @property
    def num_waiting(self) -> int:
        return len(self._ledger.queue)

    @property
    def waiting_views(self) -> Iterator[RequestView]:
        """All that wait."""
        return self._ledger.waiting.views

    def register(self, registration: Registration, now_s: float) -> int:
        """Add a replica, without any leases it may have had; return the epoch."""
        self.unregister(registration.replica_id, now_s)
        replica = ReplicaRecord(registration, registration.step_cost, heard_s=now_s)
        self.replicas.add(replica)
        if registration.kind == "lora":
            self.loras.join(registration.replica_id, registration.node)
        self.loras.note_base(registration.model)
        self.controls.note(registration)
        self.advance_held_back(now_s)
        return self._epoch

    def remember(self, registrations: Iterable[Registration], now_s: float) -> None:
        """Restore configured models from an earlier dispatcher's workers, until these register."""
        for registration in registrations:
            if registration.lane in self.queue.configured:
                self.replicas.remember(ReplicaRecord(registration, registration.step_cost, now_s))
                self.loras.note_base(registration.model)

    def unregister(self, replica_id: str, now_s: float) -> None:
        """Remove a replica; leases that it did not return count as lost."""
        replica = self.replicas.pop(replica_id, now_s)
        self._exchanges.forget(replica_id)
        self.loras.leave(replica_id)
        self.advance_held_back(now_s)
        if replica is None:
            return
        for record in list(replica.held.values()):
            self._ledger.lose(record, now_s)
        self.cascades.advance(now_s)

    def close_admission(self) -> None:
        """Refuse every offer from now on; what was accepted is seen to its end."""
        self._admission.close()

    def offer(
        self, requests: Sequence[ImageRequest], now_s: float, *, client: str | None = ""
    ) -> Offer:
        """Decide over an API call's images, and queue all of them if accepted, else none.

        Args:
            client: whose attached images they are; None for a job's.

        Raises:
            ValueError: the requests name several models.
        """
        self._unserved.note_lost(now_s)
        offer = self._admission.offer(requests, now_s, client)
        if offer.accepted and any(one.add_ons.loras for one in requests):
            # one that was removed meanwhile ends what needs it
            self._advance([], now_s, [one.request_id for one in requests])
        return offer

    def estimate(
        self, requests: Sequence[ImageRequest], now_s: float, *, client: str = ""
    ) -> Offer:
        """Return what :meth:`offer` would say now; nothing is queued, counted or logged."""
        self._unserved.note_lost(now_s)
        return self._admission.estimate(requests, now_s, client)

    def expect(self, request_ids: Iterable[str]) -> None:
        """Have replicas keep what they have of these until they are restored, or aborted."""
        self._expected.update(request_ids)

    def restore(self, restored: Restored, now_s: float) -> None:
        """Queue a durable request that an earlier dispatcher accepted."""
        self._expected.discard(restored.request.request_id)
        self._ledger.restore(restored, now_s)

    def note_stored(self, states: Mapping[str, StateHeader]) -> None:
        """Note the stored states of requests that no replica has had since the start.

        Of others a replica has reported, or will.
        """
        waiting = self._ledger.waiting
        for request_id, state in states.items():
            record = self._ledger.get(request_id)
            if record is not None and not record.num_leases and record.holder is None:
                waiting.take_out(record)
                record.note_stored(state.step_index, state.model_digest)
                record.make_progress(record.stored_steps)
                waiting.put(record)

    def poll(self, poll: Poll, now_s: float) -> PollReply:
        """Apply a replica's poll and answer it."""
        replica = self.replicas.get(poll.replica_id)
        if replica is None or poll.epoch != self._epoch:
            return PollReply(known=False)
        self.replicas.hear(replica, poll, now_s)
        self._ledger.age(now_s)
        for record in replica.unaware_of(now_s - self.grace_s):
            self._ledger.lose(record, now_s)
        if poll.lora_mark is not None:
            self.loras.note_applied(poll.replica_id, poll.lora_mark)
        lora_mark = None
        if poll.loras is not None:
            lora_mark = self.loras.hear(poll.replica_id, poll.loras)
            self._advance(self._ledger.waiting.held_for(poll.loras.lora_ids), now_s)
        self.cascades.advance(now_s)
        adopted = self._ledger.adopt_stale(replica, poll.steps_done_by_id, now_s)
        reply = self.answer(poll.replica_id, now_s)
        settings = self._settings_for(replica, poll)
        if adopted or settings is not None or lora_mark is not None:
            return replace(reply, adopted=adopted, settings=settings, lora_mark=lora_mark)
        return reply

    def _settings_for(self, replica: ReplicaRecord, poll: Poll) -> WorkerSettings | None:
        """Return the settings if a replica has not applied them yet."""
        if self._settings is None or poll.settings_version == self._settings.version:
            return None
        return worker_settings(self._settings, replica.registration.pool)

    def answer(self, replica_id: str, now_s: float) -> PollReply:
        """Return the answer to a replica's poll as of now; also asked while the poll is held."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            return PollReply(known=False)
        aborts = tuple(one for one in replica.stale if one not in self._expected)
        exchanged, preempted = self._exchanges.carry_out(replica, now_s)
        placed = self.replicas.choose(replica, self._ledger.queue, now_s, now_s - self.grace_s)
        peers, loras = self.replicas.news_for(replica), self.loras.orders(replica_id, now_s)
        news = (placed.leased, exchanged, preempted, aborts, peers, placed.others_wait)
        if loras is None and not any(news):
            return _NOTHING_TO_SAY
        self._ledger.note_passes(placed.passed)
        leases = [*exchanged, *(self._ledger.lease(one, replica, now_s) for one in placed.leased)]
        goes_on = aborts if self.stands_by else self._departed
        moved = tuple(one for one in aborts if one in self._ledger or one in goes_on)
        ids, wait = (aborts, moved, preempted), placed.others_wait
        return PollReply(True, tuple(leases), *ids, peers=peers, loras=loras, others_wait=wait)

    def advance_held_back(self, now_s: float) -> None:
        """Act on what has become of add-ons: requests go on or end, stores hear of changes."""
        self._advance(None, now_s)

    def _advance(
        self, held_back: Iterable[str] | None, now_s: float, only: Sequence[str] | None = None
    ) -> None:
        self._ledger.waiting.look_again(held_back)
        self._ledger.advance_held_back(now_s, only)
        self.cascades.advance(now_s)
        self.replicas.alert_all(self.loras.take_alerted())

    def takers(self, model: str, now_s: float) -> Iterator[str]:
        """Ids of the replicas to offer waiting requests to, one after the other."""
        return self.replicas.takers(model, self._ledger.queue, now_s - self.grace_s)

    def report(
        self, replica_id: str, events: Iterable[ReplicaEvent], now_s: float
    ) -> tuple[tuple[Outcome, ...], tuple[str, ...] | None]:
        """Apply a replica's events; return outcomes and the ids with stale fences.

        None for the ids if the replica is not known: its leases may yet be adopted.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            return self.take_outcomes(), None
        self.replicas.note_heard(replica, now_s)
        stale = []
        for event in events:
            if not self._ledger.apply(event, replica, now_s):
                stale.append(event.request_id)
            replica.named.discard(event.request_id)
        self.cascades.advance(now_s)
        return self.take_outcomes(), tuple(stale)

    def show(self, replica_id: str, shown: Shown) -> bool:
        """Store the preview of a leased request; return whether it is a new one."""
        replica = self.replicas.get(replica_id)
        return replica is not None and self._ledger.show(shown, replica)

    def preview(self, request_id: str) -> Preview | None:
        return None if (record := self._ledger.get(request_id)) is None else record.preview

    def abort(self, request_ids: Iterable[str]) -> tuple[Outcome, ...]:
        """End the requests at once; the next answer to a replica's poll says so."""
        for request_id in request_ids:
            self._expected.discard(request_id)
            if (record := self._ledger.get(request_id)) is not None:
                self._attached.abort(record)
        return self.take_outcomes()

    def leave(self, request_ids: Collection[str]) -> tuple[Outcome, ...]:
        """End requests here that go on in another cell: what is stored of them stays."""
        self._departed.update(request_ids)
        outcomes = self.abort(request_ids)
        self._ledger.take_unpublished()
        return outcomes

    def end_attached(self) -> tuple[Outcome, ...]:
        """End the attached requests for good; jobs stay."""
        self._attached.end()
        return self.take_outcomes()

    def touch(self, request_ids: Iterable[str], now_s: float) -> None:
        self._attached.touch(request_ids, now_s)

    def expire(self, now_s: float) -> tuple[Outcome, ...]:
        """Act on silence: remove dead replicas, end some of the requests whose client is gone."""
        self._attached.expire(now_s)
        if self.loras.gives_up(now_s):
            self._ledger.waiting.look_again()
        for replica in list(self.replicas):
            if now_s >= replica.heard_s + self._config.replica_timeout_s:
                self.unregister(replica.replica_id, now_s)
        return self.catch_up(now_s)

    def catch_up(self, now_s: float) -> tuple[Outcome, ...]:
        """Do a part of what is left to do; call it again, in later turns, while there is more."""
        self._advance((), now_s)
        self._unserved.end(now_s)
        self.cascades.watch(now_s)
        return self.take_outcomes()

    @property
    def is_behind(self) -> bool:
        """Whether :meth:`catch_up` has something to do."""
        waits = self._ledger.waiting.next_due_s == -math.inf
        return waits or self._unserved.is_behind or self.cascades.is_behind

    def next_event_s(self) -> float | None:
        """Return the instant at which :meth:`expire` has something to do; None if never."""
        silences = [r.heard_s + self._config.replica_timeout_s for r in self.replicas]
        own_s = (
            self._attached.next_gone_s,
            self._ledger.waiting.next_due_s,
            self._unserved.next_lost_s,
            self.cascades.next_due_s,
        )
        return None if (due_s := min([*silences, *own_s])) == math.inf else due_s

    def take_outcomes(self) -> tuple[Outcome, ...]:
        return self._ledger.take_outcomes()

    def take_deferred(self) -> list[Deferred]:
        return self.cascades.take_deferred()

    def take_unpublished(self) -> list[str]:
        return self._ledger.take_unpublished()

    def knows(self, request_id: str) -> bool:
        return request_id in self._ledger

    def open_requests(self) -> Iterator[ImageRequest]:
        return (record.request for record in self._ledger)

    def progress(
        self, request_ids: Iterable[str], now_s: float, *, predicts: Predicts
    ) -> tuple[Progress | None, ...]:
        """See :meth:`Predictions.progress`."""
        return tuple(self._predictions.progress(request_ids, now_s, predicts=predicts))

    def has_begun(self, request_ids: Iterable[str]) -> bool:
        """Whether one of the requests is leased, or a replica has worked on it."""
        records = (self._ledger.get(one) for one in request_ids)
        return any(one is not None and (one.holder or one.view.steps_done) for one in records)

    def models(self) -> dict[str, ModelProfile]:
        """Return the profiles of the models that a replica ever registered and are offered."""
        found = self.replicas.profiles.items()
        return {name: profile for name, profile in found if name not in self._admission.removed}

    def num_open_by_model(self) -> Counter[str]:
        """Return how many requests need a queue: for their present stage, or for a later one
        without which there is no image."""
        counts = Counter(record.view.model for record in self._ledger)
        for record in self._ledger:
            later = record.stages.specs[record.stages.index + 1 :]
            counts.update(spec.lane for spec in later if spec.is_vital)
        return counts

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        return ClusterSnapshot.of(
            self._ledger,
            self.replicas,
            queue=self.queue,
            num_loras=len(self.loras),
            missing_controls=self.controls.missing,
            cascades=self.cascades.views(),
            now_s=now_s,
        )
