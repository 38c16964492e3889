"""The records of all open requests: waiting or leased, and how each one ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.dispatch.queue.due import Due
from ray_cluster.dispatch.queue.waiting import WaitingRoom
from ray_cluster.dispatch.records import ReplicaRecord, RequestRecord, Restored, as_offered
from ray_cluster.dispatch.reports.demand import Demand
from ray_cluster.dispatch.reports.log import log_end, log_image
from ray_cluster.dispatch.reports.statistics import CALLERS_OWN, OutcomeCounters, PredictionStats
from ray_cluster.dispatch.stages import (
    RequestStages,
    StageEnd,
    StageSpec,
    finish,
    request_in,
    stages_of,
    view_in,
)
from ray_cluster.dispatch.workers.controlnets import ControlNets
from ray_cluster.policies.leasing.ordering import ages_at_s
from ray_cluster.policies.types import Offer, RequestView
from ray_cluster.protocol.leases import (
    Failed,
    Fence,
    Finished,
    Lease,
    ReplicaEvent,
    Returned,
    Scored,
    Shown,
)
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import Failure, ImageRequest, ImageResult


class Ledger:
    """Keeps every accepted request in exactly one place until it ends, then forgets it.

    A request waits (it is in ``waiting``, its fence is None) or is leased (it is among one
    replica's ``held``, its fence is that of the lease). One between two stages is at neither place
    until :meth:`take_between`, in the same call.

    Args:
        config: the number of lost leases after which a request ends as ``lost``, and when it ages.
        epoch: of the fences.
        loras: of the cell; told of all open requests.
        controls: of the cell.

    Attributes:
        stats: what predictions rest on.
        counters: for metrics.
        demand: for the controller.
        later: requests whose present stage is not the first one, by id.
    """

    def __init__(
        self,
        config: DispatchConfig,
        loras: Loras,
        controls: ControlNets,
        demand: Demand,
        *,
        epoch: int,
    ) -> None:
        self.waiting = WaitingRoom(loras, controls)
        self.queue = self.waiting.queue
        self._loras = loras
        self.stats = PredictionStats()
        self.counters = OutcomeCounters()
        self.demand = demand
        self._epoch = epoch
        self._max_attempts = config.max_attempts
        self._starvation_s = config.starvation_s
        self._ageing = Due(self._ages_at_s, self.get)
        self._num_fences = 0
        self._records: dict[str, RequestRecord] = {}
        self.later: dict[str, RequestRecord] = {}
        self._attached: dict[str, dict[str, RequestRecord]] = {}
        self._ended: list[Outcome] = []
        # neither waiting nor leased, with the end of a stage that has made no image
        self._between: list[tuple[RequestRecord, StageEnd | None]] = []
        self._unpublished: list[str] = []

    def apply_settings(self, config: DispatchConfig) -> None:
        """Apply other settings; requests that have aged stay so."""
        self._max_attempts = config.max_attempts
        self._starvation_s = config.starvation_s
        self._ageing.restart(self._records)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._records

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def attached_of(self, client: str) -> Collection[RequestRecord]:
        """Return the requests of a client that end with it and have not ended."""
        return self._attached.get(client, {}).values()

    def accept(
        self,
        requests: Sequence[ImageRequest],
        views: Sequence[RequestView],
        offer: Offer,
        *,
        client: str | None,
        slo_s: float,
        now_s: float,
    ) -> None:
        """Open records for a group and queue it, as it was offered.

        Args:
            client: whose attached images they are; None for a job's.
            slo_s: of requests that name none.
        """
        for request, view in as_offered(requests, views, offer):
            client_s = None if client is None else now_s
            whose = request.sharer if client is None else client
            record = self._open(request, view, stages_of(request), slo_s, client_s, whose)
            record.predicted_s, record.is_simulated = offer.predicted_s, offer.is_simulated
            self.stats.note_accepted(view)
            self.counters.totals["accepted"] += 1
            record.counted = self.demand.note_accepted(request, view, whose, now_s)
            log_image("image_accepted", record)

    def restore(self, restored: Restored, now_s: float) -> None:
        """Queue a durable request that an earlier dispatcher accepted."""
        request, stages, arrival_s = restored.request, restored.stages, now_s - restored.age_s
        deadline_s = arrival_s + restored.slo_s
        view = view_in(request, stages.present, arrival_s=arrival_s, deadline_s=deadline_s)
        record = self._open(request, view, stages, restored.slo_s, None, request.sharer)
        record.image = restored.light
        record.times = () if restored.deferred is None else restored.deferred.stages
        record.may_resume = True
        # how much of the time before was work is not known
        record.since_s = now_s
        self.counters.totals["restored"] += 1
        if stages.index:
            self.later[request.request_id] = record
        log_image("image_restored", record)

    def _open(
        self,
        request: ImageRequest,
        view: RequestView,
        stages: RequestStages,
        slo_s: float,
        client_s: float | None,
        client: str,
    ) -> RequestRecord:
        slo_s = slo_s if request.slo_s is None else request.slo_s
        since_s = view.arrival_s
        record = RequestRecord(request, view, stages, slo_s, client_s, since_s, since_s, client)
        self._records[request.request_id] = record
        if client_s is not None:
            self._attached.setdefault(client, {})[request.request_id] = record
        self._loras.note_open(request)
        self.waiting.put(record)
        self._ageing.add(record, len(self._records))
        return record

    def advance_held_back(self, now_s: float, only: Sequence[str] | None = None) -> None:
        """See :meth:`WaitingRoom.release`; end those that cannot have their add-ons."""
        for record, failure in self.waiting.release(now_s, only):
            self._fail(record, failure, now_s)

    def age(self, now_s: float) -> None:
        """Put requests first that have waited too long, some of them at once."""
        for record in self._ageing.take(now_s):
            self.waiting.put_first(record)

    def _ages_at_s(self, record: RequestRecord) -> float:
        return ages_at_s(record.view, self._starvation_s)

    def lease(self, request_id: str, replica: ReplicaRecord, now_s: float) -> Lease:
        """Move a waiting request to a replica, under a new fence."""
        record = self._records[request_id]
        may_resume = record.may_resume
        fence = self._grant(record, replica, now_s)
        record.num_leases += 1
        log_image("image_leased", record, queue_s=record.queued_s)
        orders = self._loras.orders_of(record.request)
        return record.lease(fence, now_s, orders, may_resume=may_resume)

    def note_passes(self, request_ids: Iterable[str]) -> None:
        """Count later requests that are leased before these, which wait."""
        for one in request_ids:
            self.waiting.note_passed(self._records[one])

    def adopt(self, record: RequestRecord, replica: ReplicaRecord, now_s: float) -> Fence:
        """Give a waiting request to the replica that has it already; it is no new attempt."""
        fence = self._grant(record, replica, now_s)
        # it has its slot there already
        replica.num_free += 1
        record.num_leases = max(1, record.num_leases)
        self.counters.totals["adopted"] += 1
        log_image("image_adopted", record)
        return fence

    def adopt_stale(
        self, replica: ReplicaRecord, steps_done_by_id: Mapping[str, int], now_s: float
    ) -> dict[str, Fence]:
        """Lease to a replica what it works on and no other replica was leased."""
        adopted = {}
        for request_id in replica.stale:
            record = self._records.get(request_id)
            waits = record is not None and record.holder is None
            if record is not None and waits and record.view.model == replica.model:
                adopted[request_id] = self.adopt(record, replica, now_s)
                record.make_progress(steps_done_by_id[request_id])
        return adopted

    def _grant(self, record: RequestRecord, replica: ReplicaRecord, now_s: float) -> Fence:
        self.waiting.take_out(record)
        self._num_fences += 1
        record.fence = Fence(self._epoch, self._num_fences)
        record.holder = replica
        record.queued_s += now_s - record.since_s
        record.since_s = record.leased_s = now_s
        record.may_resume = True
        if record.kept_digest != replica.registration.model_digest:
            # steps of another model are worth nothing on this one
            record.stored_steps = 0
            record.make_progress(0)
        replica.take(record)
        return record.fence

    def apply(self, event: ReplicaEvent, replica: ReplicaRecord, now_s: float) -> bool:
        """Apply a replica's report of a request; return False if its fence is stale."""
        record = self._leased(event, replica)
        if record is None:
            return False
        decides = record.stages.present.rules.decides
        match event:
            case Finished() if not decides:
                self._finish(record, event, now_s)
            case Scored(confidence=confidence) if decides:
                # what is no confidence counts as none
                found: StageEnd = confidence if 0 <= confidence <= 1 else "invalid"
                self.leave_stage(record, found, now_s)
            case Failed():
                self._fail(record, event.failure, now_s)
            case Returned():
                record.note_stored(event.steps_done, replica.registration.model_digest)
                self._requeue(record, now_s, "preempted" if record.is_preempted else "returned")
            case _:
                return False
        return True

    def show(self, shown: Shown, replica: ReplicaRecord) -> bool:
        """Keep a preview; return False if its fence is stale or a later one is here."""
        record = self._leased(shown, replica)
        return record is not None and record.show(shown.preview)

    def _leased(self, event: ReplicaEvent | Shown, replica: ReplicaRecord) -> RequestRecord | None:
        """Return the record of a replica's request, if its lease is current."""
        record = self._records.get(event.request_id)
        if record is None or record.holder is not replica or record.fence != event.fence:
            return None
        return record

    def lose(self, record: RequestRecord, now_s: float) -> None:
        """Take a lease from a replica that is gone: the request waits again, or ends as lost."""
        record.num_losses += 1
        if record.num_losses < self._max_attempts:
            self._requeue(record, now_s, "lost")
            return
        message = f"{record.num_losses} replicas were lost while they worked on it"
        self.fail(record, "lost", message, now_s)

    def fail(
        self,
        record: RequestRecord,
        kind: Literal["error", "aborted", "lost"],
        message: str,
        now_s: float | None = None,
    ) -> None:
        """End a request without an image of the present stage.

        Args:
            now_s: if it may go on without.
        """
        stage: Literal["queue", "replica"] = "queue" if record.holder is None else "replica"
        self._fail(record, Failure(record.view.request_id, kind, message, stage), now_s)

    def _fail(self, record: RequestRecord, failure: Failure, now_s: float | None) -> None:
        if now_s is not None and failure.kind != "aborted" and record.outlives_stage:
            self.leave_stage(record, failure.kind, now_s)
            return
        self.counters.totals[failure.kind] += 1
        self._end(record, failure)

    def leave_stage(self, record: RequestRecord, end: StageEnd, now_s: float) -> None:
        """End the present stage without an image: whoever takes it next decides what follows."""
        self._end_stage(record, now_s)
        self._put_between(record, end)

    def _put_between(self, record: RequestRecord, end: StageEnd | None) -> None:
        self._withdraw(record)
        self._between.append((record, end))

    def take_between(self) -> list[tuple[RequestRecord, StageEnd | None]]:
        """Return requests whose next stage is to begin, and those whose stage has made no image,
        with how it has ended: enqueue or complete each of them.
        """
        records, self._between = self._between, []
        return records

    def enqueue(self, record: RequestRecord, view: RequestView, now_s: float) -> None:
        """Queue a request for its next stage, however many wait: it was accepted already."""
        self.later[view.request_id] = record
        record.begin_stage(view, now_s)
        self.waiting.put(record)

    def take_outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcomes that were not handed out yet."""
        outcomes, self._ended = tuple(self._ended), []
        return outcomes

    def take_unpublished(self) -> list[str]:
        """Return the names of images in the result store that ended requests do not need."""
        unpublished, self._unpublished = self._unpublished, []
        return unpublished

    def _finish(self, record: RequestRecord, event: Finished, now_s: float) -> None:
        """Note that the present stage has made an image: for the next one, or to be published."""
        self._note_made(record, event.result, now_s)
        self._end_stage(record, now_s)
        record.image = _joined(record.image, event.result, record.stages.present)
        record.stages = stages = finish(record.stages, record.stages.index)
        if stages.is_published:
            self.complete(record, now_s)
            return
        record.small = event.small if stages.present.rules.takes == "small" else None
        self._put_between(record, None)

    def _note_made(self, record: RequestRecord, result: ImageResult, now_s: float) -> None:
        """Compare the end of the present stage with what was predicted of it."""
        took_s = now_s - record.entered_s
        self.stats.note_end(record, result.timing, took_s, now_s)
        self.counters.note_ratio(record.view.model, took_s=took_s, predicted_s=record.predicted_s)

    def _end_stage(self, record: RequestRecord, now_s: float) -> None:
        spec, took_s = record.stages.present, now_s - record.entered_s
        self.counters.note_stage(record.request.called_model, spec.name or spec.kind, took_s)
        record.end_stage(now_s)

    def complete(self, record: RequestRecord, now_s: float) -> None:
        """End a request whose stages have published the image so far."""
        completed, made = record.completed(now_s), request_in(record.request, record.stages.author)
        self.counters.made[made.model, made.fidelity or "unknown"] += 1
        self.counters.totals["completed"] += 1
        self.counters.totals["missed"] += not completed.deadline_met
        self._end(record, completed)

    def _requeue(self, record: RequestRecord, now_s: float, reason: str) -> None:
        steps_done = record.stored_steps
        log_image("image_requeued", record, reason=reason, steps_done=steps_done)
        self._release(record)
        record.since_s = now_s
        record.make_progress(steps_done)
        self.waiting.put(record)
        self.counters.totals["requeued"] += 1

    def _withdraw(self, record: RequestRecord) -> None:
        self.later.pop(record.view.request_id, None)
        self.waiting.discard(record)
        self._release(record)

    def _release(self, record: RequestRecord) -> None:
        if record.holder is not None:
            record.holder.drop(record)
        record.holder = record.fence = None
        record.is_preempted = False

    def _end(self, record: RequestRecord, outcome: Outcome) -> None:
        log_end(record, outcome)
        if isinstance(outcome, Completed) and outcome.cascade is not None:
            answer = outcome.cascade
            self.counters.answered[answer.name, answer.stage, answer.reason] += 1
        if isinstance(outcome, Failure) and outcome.kind != "lost" and not record.stages.made:
            self.demand.note_unmade(record)
        if isinstance(outcome, Completed) or outcome.kind not in CALLERS_OWN:
            self.counters.note_end(record.request, outcome)
        if not (isinstance(outcome, Completed) and outcome.is_candidate):
            self._unpublished += record.candidates
        self._withdraw(record)
        self._loras.note_end(record.request)
        del self._records[record.view.request_id]
        attached = self._attached.get(record.client, {})
        if attached.pop(record.view.request_id, None) is not None and not attached:
            del self._attached[record.client]
        if isinstance(outcome, Failure):
            outcome = replace(outcome, attempts=record.attempts)
        self._ended.append(outcome)


def _joined(before: ImageResult | None, made: ImageResult, spec: StageSpec) -> ImageResult:
    """Return what a stage has made, with times and degrees of those whose image it took."""
    if before is None or spec.rules.takes != "image":
        return made
    timing, degrees = before.timing.plus(made.timing), before.steps_by_degree
    return replace(made, timing=timing, steps_by_degree=degrees)
