"""The dispatch core's records of one request and of one replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_cluster.dispatch.stages import RequestStages, decide, finish, request_in, stages_of
from ray_cluster.policies.admission.load import Load, load_s, total_load
from ray_cluster.policies.cascade import CascadeDecision
from ray_cluster.policies.costs.cost_model import lesser_cost, share_cost
from ray_cluster.policies.types import GroupCost, Offer, ReplicaView, RequestView, StepCost
from ray_cluster.protocol.leases import Fence, Lease, Poll, Registration
from ray_cluster.protocol.loras import LoraOrder
from ray_cluster.protocol.outcomes import CascadeAnswer, Completed, Deferred, Preview, StageTime
from ray_cluster.protocol.settings import Capacity
from ray_cluster.requests import ImageRequest, ImageResult, SmallImage, candidate_name, granted


def as_offered(
    requests: Sequence[ImageRequest], views: Sequence[RequestView], offer: Offer
) -> Iterator[tuple[ImageRequest, RequestView]]:
    """Requests and their views, with the steps that they were accepted with."""
    if not offer.num_steps:
        yield from zip(requests, views, strict=True)
        return
    for request, view in zip(granted(requests, offer.num_steps), views, strict=True):
        yield request, replace(view, num_steps=request.num_steps)


@dataclass(frozen=True, slots=True)
class Restored:
    """A durable request that an earlier dispatcher accepted, ``age_s`` seconds ago.

    Attributes:
        slo_s: seconds from arrival to the deadline.
        deferred: the decision over its light image, if that was deferred.
        light: that image, if the result store has it.
    """

    request: ImageRequest
    age_s: float
    slo_s: float
    deferred: Deferred | None = None
    light: ImageResult | None = None

    @property
    def stages(self) -> RequestStages:
        """Where it goes on: after the decision, if there was one, or else from the beginning."""
        stages, deferred = stages_of(self.request), self.deferred
        if deferred is None or stages.is_last:
            return stages
        stages = finish(stages, 0)
        decision = CascadeDecision(is_deferred=True, reason=deferred.reason)
        return decide(stages, 1, decision, deferred.confidence, deferred.threshold)


@dataclass(frozen=True, slots=True)
class Counted:
    """What an accepted request counted for as demand.

    Attributes:
        reading: number of the reading before which it was counted.
        images: typical ones.
        steps: of each of its ControlNets.
        work_s: replica seconds that it counted for.
        paid_s: replica seconds that its client owed and that it did not count for.
    """

    reading: int
    images: float
    steps: float
    work_s: float
    paid_s: float


@dataclass(slots=True)
class RequestRecord:
    """One accepted request until it ends; it waits while no replica holds it.

    Attributes:
        view: of the present stage, like its leases and what is predicted.
        stages: where it is in its list of stages.
        slo_s: seconds from arrival to the deadline.
        client_s: instant at which its client was last heard of; None for a job's.
        client: whose it is, for the bound on its images in flight.
        since_s: instant at which it last entered the queue, or was last known to be held.
        leased_s: instant of its present lease.
        queued_s: seconds spent in the queue before ``since_s``.
        num_leases: leases so far.
        num_losses: leases that ended because the replica died or lost them.
        stored_steps: steps that are known to be in the state store.
        kept_digest: of the model that they were done with.
        may_resume: whether a replica may have worked on it, so that there may be a state of it.
        preview: the last one.
        predicted_s: seconds from arrival to its end, predicted on arrival; 0 without a prediction.
        is_simulated: how, see :class:`ray_cluster.policies.types.Offer`.
        is_preempted: whether its holder is to release it, and has not yet.
        asked_s: instant at which its holder was last asked to.
        counted: as demand; None for one that an earlier dispatcher accepted.
        image: that its stages have made so far; without bytes where the result store has it.
        small: a copy of it for a stage that takes no other.
        entered_s: instant at which the present stage began.
        times: of the stages that have ended, for the reply of a cascade.
        num_repeated: leases of these, beyond one for each.
    """

    request: ImageRequest
    view: RequestView
    stages: RequestStages
    slo_s: float
    client_s: float | None
    since_s: float
    entered_s: float
    client: str = ""
    leased_s: float = 0.0
    queued_s: float = 0.0
    num_leases: int = 0
    num_losses: int = 0
    fence: Fence | None = None
    holder: ReplicaRecord | None = None
    stored_steps: int = 0
    kept_digest: str = ""
    may_resume: bool = False
    preview: Preview | None = None
    predicted_s: float = 0.0
    is_simulated: bool = False
    is_preempted: bool = False
    asked_s: float = 0.0
    counted: Counted | None = None
    image: ImageResult | None = None
    small: SmallImage | None = None
    times: tuple[StageTime, ...] = ()
    num_repeated: int = 0

    @property
    def deadline_s(self) -> float:
        """Instant of its deadline; that of an early stage of a cascade is before it."""
        return self.view.arrival_s + self.slo_s

    @property
    def outlives_stage(self) -> bool:
        """Whether it goes on if the present stage fails."""
        if self.stages.present.rules.decides:
            return True
        if self.requires_heavy and self.stages.present.rules.takes == "nothing":
            return False
        return self.image is not None and self.stages.can_fall_back

    @property
    def requires_heavy(self) -> bool:
        """Whether an image that is to be made anew is not the answer."""
        use = self.request.cascade
        return use is not None and use.requires_heavy

    @property
    def present(self) -> ImageRequest:
        """The request as its image is made in the present stage, or was that this one takes."""
        stages, request = self.stages, self.request
        if self.image is not None and stages.present.rules.takes != "nothing":
            return request_in(request, stages.author)
        request, output = request_in(request, stages.present), request.output
        if not self.shown:
            return request
        return replace(request, output=replace(output, num_previews=output.num_previews - 1))

    @property
    def shown(self) -> bytes:
        """The image so far, if it is the first preview of the one that is made anew."""
        if self.image is None or not self.request.output.num_previews:
            return b""
        return self.image.data if self.stages.present.rules.takes == "nothing" else b""

    @property
    def has_candidate(self) -> bool:
        """Whether the result store has an image of it under a candidate's name."""
        return bool(self.stages.made and self.candidates)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names there that its images may have."""
        stages, request_id = self.stages, self.request.request_id
        # a lost worker may have stored one before it could say so
        if not self.request.leaves_files or not (stages.made or self.num_leases):
            return ()
        early = enumerate(stages.specs[:-1])
        return tuple(
            candidate_name(request_id, index) for index, spec in early if not spec.rules.decides
        )

    @property
    def attempts(self) -> int:
        """Leases so far; of several stages one, and those that repeated an earlier one."""
        if not self.stages.made:
            return self.num_leases
        return 1 + self.num_repeated + max(0, self.num_leases - 1)

    def completed(self, now_s: float) -> Completed:
        """Return the outcome of a request whose stages have published the image so far."""
        stages, view = self.stages, self.view
        assert self.image is not None, "there is no image"
        return Completed(
            request_id=view.request_id,
            result=self.image,
            num_steps=request_in(self.request, stages.author).num_steps,
            slo_s=self.slo_s,
            elapsed_s=now_s - view.arrival_s,
            attempts=self.attempts,
            cascade=self._answer(),
            is_candidate=self.has_candidate and stages.made[-1] + 1 < len(stages.specs),
        )

    def _answer(self) -> CascadeAnswer | None:
        use, stages = self.request.cascade, self.stages
        if use is None:
            return None
        author = stages.author
        assert author.name is not None, "stages of cascades have names"
        return CascadeAnswer(
            name=use.name,
            model=author.model,
            stage=author.name,
            reason=stages.reason or use.reason,
            confidence=stages.confidence,
            threshold=stages.threshold,
            stages=self.times,
        )

    def _source(self) -> str:
        stages = self.stages
        if stages.present.rules.takes != "image":
            return ""
        return candidate_name(self.request.request_id, stages.made[-1])

    def lease(
        self, fence: Fence, now_s: float, orders: tuple[LoraOrder, ...], *, may_resume: bool
    ) -> Lease:
        """Return its lease, just granted."""
        return Lease(
            fence=fence,
            request=self.present,
            deadline_in_s=self.view.deadline_s - now_s,
            queued_s=self.queued_s,
            may_resume=may_resume,
            is_candidate=not self.stages.is_last,
            stage=self.stages.index,
            source=self._source(),
            scored=self.small,
            loras=orders,
        )

    def end_stage(self, now_s: float) -> None:
        """Note what the present stage took."""
        spec = self.stages.present
        if spec.name is not None:
            took_s = now_s - self.entered_s
            time = StageTime(spec.name, spec.model, min(self.queued_s, took_s), took_s)
            self.times = (*self.times, time)
        self.entered_s = now_s

    def begin_stage(self, view: RequestView, now_s: float) -> None:
        """Forget the stage that has ended; nobody holds the request now."""
        self.num_repeated += max(0, self.num_leases - 1)
        # it may have aged
        self.view = replace(view, priority=self.view.priority, arrival_s=self.view.arrival_s)
        self.since_s = now_s
        self.queued_s = 0.0
        self.num_leases = self.num_losses = self.stored_steps = 0
        self.kept_digest = ""
        self.may_resume = self.is_preempted = False
        self.predicted_s = 0.0

    def note_stored(self, steps_done: int, model_digest: str) -> None:
        is_same = model_digest == self.kept_digest
        self.stored_steps = max(self.stored_steps, steps_done) if is_same else steps_done
        self.kept_digest = model_digest

    def show(self, preview: Preview) -> bool:
        """Keep a preview; return False if a later one is here."""
        if self.shown:
            # which was the first one
            preview = replace(preview, index=preview.index + 1)
        if self.preview and self.preview.index >= preview.index:
            return False
        self.preview = preview
        return True

    def make_progress(self, steps_done: int) -> bool:
        """Set the number of steps done, within what is asked for; return whether it changed."""
        steps_done = max(0, min(self.view.num_steps, steps_done))
        if steps_done == self.view.steps_done:
            return False
        self.view = replace(self.view, steps_done=steps_done)
        return True


@dataclass(slots=True)
class ReplicaRecord:
    """One live replica.

    Attributes:
        heard_s: instant of its last sign of life.
        joined_s: instant at which it registered.
        reported_s: instant at which it last reported its progress.
        peers_version: of the directory that it has.
        settings_version: of the settings that it applies.
        num_free: free slots by its last poll, less what it was leased since.
        named: ids in its last poll, less those it has reported since.
        held: the requests leased to it, by id; changed by :meth:`take` and :meth:`drop` only.
        residents: ids of what is there or being fetched, by its last poll.
        merged: the set of LoRAs that its model is merged with, likewise.
        group: what steps cost on its ranks, likewise; None for one without.
        seats: the ranks that its requests step on, likewise.
        changed: shared set of ids of replicas that have changed; its reader empties it.
        model: name of the queue that it leases from; see :attr:`Registration.lane`.
    """

    registration: Registration
    step_cost: StepCost
    heard_s: float
    num_free: int = 0
    named: set[str] = field(default_factory=set)
    held: dict[str, RequestRecord] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    reported_s: float = 0.0
    peers_version: str = ""
    residents: frozenset[str] = field(init=False)
    merged: str = ""
    group: GroupCost | None = field(init=False)
    seats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    settings_version: str = ""
    replica_id: str = field(init=False)
    model: str = field(init=False)
    joined_s: float = field(init=False)
    _view: ReplicaView | None = None
    _load: Load | None = None
    _shared: tuple[StepCost, StepCost] | None = None

    def __post_init__(self) -> None:
        self.residents = frozenset(self.registration.residents)
        self.group = self.registration.group
        self.replica_id = self.registration.replica_id
        self.model = self.registration.lane
        self.joined_s = self.heard_s

    @property
    def best_cost(self) -> StepCost:
        """The lowest cost known of it: of its start, before any load, or the present one."""
        return lesser_cost(self.step_cost, self.registration.step_cost)

    @property
    def stale(self) -> tuple[str, ...]:
        if self.named <= self.held.keys():
            return ()
        return tuple(sorted(self.named - self.held.keys()))

    def hear(self, poll: Poll, now_s: float) -> None:
        """Apply a poll: its progress, its free slots, and the leases it knows of."""
        self.heard_s = self.reported_s = now_s
        self.settings_version = poll.settings_version
        step_cost = poll.step_cost or self.step_cost
        residents = self.residents if poll.residents is None else frozenset(poll.residents)
        is_changed = poll.num_free != self.num_free or step_cost != self.step_cost
        is_changed |= residents != self.residents or poll.merged != self.merged
        self.merged, self.group = poll.merged, poll.group or self.group
        self.seats = poll.seats
        self.num_free, self.step_cost, self.residents = poll.num_free, step_cost, residents
        self.named = set(poll.steps_done_by_id)
        self.peers_version = poll.peers_version
        for request_id, steps_done in poll.steps_done_by_id.items():
            if (record := self.held.get(request_id)) is not None:
                record.since_s = now_s
                # 0 while the state that it goes on from is being fetched
                is_changed |= record.make_progress(steps_done or record.stored_steps)
        if is_changed:
            self._note_change()

    def resize(self, capacity: Capacity | None) -> bool:
        """Apply how much it takes at once by now; return whether it changed."""
        was = self.registration
        if capacity is None or capacity == Capacity(was.max_in_flight, was.max_batch):
            return False
        self.registration = replace(
            was, max_in_flight=capacity.max_in_flight, max_batch=capacity.max_batch
        )
        self._shared = None
        self._note_change()
        return True

    def unaware_of(self, before_s: float) -> tuple[RequestRecord, ...]:
        """Return what it was leased but has not named in a poll since that instant."""
        return tuple(record for record in self.held.values() if record.since_s < before_s)

    def take(self, record: RequestRecord) -> None:
        self._note_change()
        self.held[record.view.request_id] = record
        self.num_free -= 1

    def drop(self, record: RequestRecord) -> None:
        """Hold a request no more; its slot is free once the replica reports so."""
        self._note_change()
        del self.held[record.view.request_id]

    def load(self) -> Load:
        """Return what the requests that it holds still take; added up only after a change."""
        if self._load is None:
            self._load = total_load(record.view for record in self.held.values())
        return self._load

    def view(self) -> ReplicaView:
        """Return what a policy may know of it; made anew only after a change."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _note_change(self) -> None:
        self._view = self._load = None
        self.changed.add(self.replica_id)

    def _make_view(self) -> ReplicaView:
        return ReplicaView(
            replica_id=self.replica_id,
            model=self.model,
            max_in_flight=self.registration.max_in_flight,
            max_batch=self.registration.max_batch,
            step_cost=self.step_cost,
            num_leased=len(self.held),
            num_free=self.num_free,
            leased_work_s=load_s(self._share_cost(), self.load()),
            residents=self._all_residents(),
            merged=self.merged,
        )

    def _all_residents(self) -> frozenset[str]:
        """What is there by its last poll, and what the requests that it holds make it fetch."""
        needs = {need for record in self.held.values() for need in record.view.needs}
        return self.residents if needs <= self.residents else self.residents | needs

    def _share_cost(self) -> StepCost:
        """One request's part of a full batch's step; made anew only for another cost."""
        if self._shared is None or self._shared[0] is not self.step_cost:
            cost = self.step_cost
            self._shared = (cost, share_cost(cost, self.registration.max_batch))
        return self._shared[1]
