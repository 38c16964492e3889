"""The protocol between dispatcher and replicas: replicas register, poll for leases, report events.

A lease carries a fence. A replica drops rows whose fence is stale, and the dispatcher refuses a
report under a stale fence, so that work done twice never counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_cluster.config.kinds import KINDS, WorkerKind
from ray_cluster.config.loading import Document, kind_of_section
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.errors import LAST_STAGES
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import GroupCost, StepCost
from ray_cluster.protocol.calling.changes import Mark
from ray_cluster.protocol.loras import LoraOrder, LoraOrders, LoraReports
from ray_cluster.protocol.outcomes import Preview
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.requests import (
    Failure,
    ImageRequest,
    ImageResult,
    ModelProfile,
    PromptTokenizer,
    SmallImage,
)

# longest time from an abort's arrival to the replica's last write to the result store
LATE_WRITE_S = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """Orders leases: ``epoch`` is one dispatcher's life, ``counter`` grows with every lease."""

    epoch: int
    counter: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right and the duty to make one image, or to score one.

    A lease for a request that the replica holds already replaces the row.

    Attributes:
        deadline_in_s: seconds from the lease to the deadline (clocks differ between machines).
        queued_s: seconds the request has spent in the waiting queue, over all its leases.
        may_resume: whether a state of it may be in the store.
        is_candidate: whether the image is not to be published yet: its small form comes with the
            report, and a stored image gets :func:`ray_cluster.requests.candidate_name`.
        stage: index of the stage, for that name.
        source: name in the result store of the image that is gone on with.
        scored: the image to score, for a discriminator.
        loras: those that the request names, for a replica whose node has none of them yet.
    """

    fence: Fence
    request: ImageRequest
    deadline_in_s: float
    queued_s: float
    may_resume: bool = False
    is_candidate: bool = False
    stage: int = 0
    source: str = ""
    scored: SmallImage | None = None
    loras: tuple[LoraOrder, ...] = ()


def lane_of(kind: WorkerKind, name: str) -> str:
    """Return the name of the queue of those that serve something: no two kinds share one."""
    return name if kind == "denoise" else f"{kind}:{name}"


def split_lane(lane: str) -> tuple[WorkerKind, str]:
    """Return the kind of those who lease from a queue, and what they serve."""
    for kind in KINDS:
        if kind != "denoise" and lane.startswith(prefix := lane_of(kind, "")):
            return kind, lane.removeprefix(prefix)
    return "denoise", lane


def lane_words(lane: str) -> str:
    """Return what the workers of a queue are, or serve, for people."""
    kind, name = split_lane(lane)
    return f"the {'model' if kind == 'denoise' else KINDS[kind].title} {name}"


def called_lane(worker: WorkerConfig) -> str:
    """Return the queue of a worker that calls ask for; empty for one that only others ask for."""
    if isinstance(worker, PoolConfig):
        return worker.model_name
    kind = kind_of_section(type(worker))
    return lane_of(kind, worker.name) if kind in LAST_STAGES else ""


def lanes_of(document: Document) -> frozenset[str]:
    """Return the queues of what calls may ask of those whom a configuration lists."""
    return frozenset(map(called_lane, document.workers)) - {""}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process listens for calls of others; not to be logged.

    Attributes:
        target: host and port.
        secret: must come with every call.
    """

    target: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class LoadedWords:
    """How a replica runs its model, for people.

    Attributes:
        number_format: that its weights are in.
        sampling: how calls are sampled that say nothing, and where that comes from.
        memory: the plan that it was loaded under.
    """

    number_format: str
    sampling: str
    memory: str


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker is. Registering again under the same id drops its earlier leases.

    Attributes:
        profile: of the model that it makes images with; None if it makes none.
        max_in_flight: most requests that it holds at once.
        max_batch: most requests that it steps together.
        pool: the pool of the configuration that it belongs to.
        served_as: name of what it serves, without a profile.
        device_type: what it computes on, such as ``cpu`` or ``NVIDIA H100``.
        node: where it runs; workers of one node share memory.
        endpoint: for other workers; None if none call it.
        load_s: seconds that loading its model took.
        model_digest: of its model's files; states are gone on with only on the same one.
        residents: ids of its resident adapters and templates; see
            :mod:`ray_cluster.policies.residents`.
        arguments: what it was started with; see :func:`ray_cluster.config.slices.registered`.
        prompt_tokenizers: those that :attr:`ModelProfile.prompt_digest` is of.
        words: of a model's replica.
        group: of a replica whose model runs on several ranks.
    """

    replica_id: str
    profile: ModelProfile | None
    max_in_flight: int
    max_batch: int
    step_cost: StepCost
    pool: str = ""
    kind: WorkerKind = "denoise"
    served_as: str = ""
    device_type: str = ""
    node: str = ""
    endpoint: Endpoint | None = None
    load_s: float = 0.0
    model_digest: str = ""
    residents: tuple[str, ...] = ()
    arguments: str = ""
    prompt_tokenizers: tuple[PromptTokenizer, ...] = ()
    words: LoadedWords | None = None
    group: GroupCost | None = None

    @property
    def model(self) -> str:
        """Name of what it serves."""
        return self.served_as if self.profile is None else self.profile.model

    @property
    def lane(self) -> str:
        """Name of the queue that it leases from: no two kinds share one."""
        return lane_of(self.kind, self.model)


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that others call, such as a ControlNet's.

    Attributes:
        name: of what it serves.
        node: where it runs; workers of one node share memory.
    """

    kind: WorkerKind
    name: str
    replica_id: str
    node: str
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Directory:
    """All workers that others call.

    Attributes:
        version: differs whenever the peers differ; empty without any.
    """

    version: str = ""
    peers: tuple[Peer, ...] = ()

    def named(self, kind: WorkerKind, name: str) -> tuple[Peer, ...]:
        """Return the workers of a kind that serve something."""
        return tuple(one for one in self.peers if (one.kind, one.name) == (kind, name))


@dataclass(frozen=True, slots=True)
class Poll:
    """A replica's heartbeat and its request for work.

    Attributes:
        epoch: the dispatcher's epoch as given at registration.
        num_free: leases that it can take now; 0 only shows that it lives.
        steps_done_by_id: progress of all requests it holds, from the lease (0 while it encodes)
            until the report of their end was answered. A lease that is missing here for two poll
            times counts as lost on the way and is given to another replica. An id that is not
            leased to this replica comes back in ``PollReply.adopted`` if no other replica has it,
            else in ``PollReply.aborts``.
        step_cost: its present measured cost of a step.
        metrics: its present values; None from a worker that measures nothing.
        peers_version: of the directory that it has.
        residents: all present ones; None if they have not changed. What its requests need counts
            as resident, as it is being fetched.
        settings_version: of its settings; empty before it has had any.
        capacity: by these settings; None leaves the registered one.
        loras: what has changed of what a store of LoRAs has or could not get, since the last
            :attr:`PollReply.lora_mark`; None if nothing has.
        lora_mark: how far a store knows what it is to have; None from other workers.
        merged: the set of LoRAs that its model is merged with, so that it is to be leased no other
            requests; empty where none is.
        group: what steps cost at present on its ranks; None from a replica without.
        seats: the ranks that its requests step on at present, by their ids.
    """

    replica_id: str
    epoch: int
    num_free: int
    steps_done_by_id: Mapping[str, int] = field(default_factory=dict)
    step_cost: StepCost | None = None
    metrics: Snapshot | None = None
    peers_version: str = ""
    residents: tuple[str, ...] | None = None
    settings_version: str = ""
    capacity: Capacity | None = None
    loras: LoraReports | None = None
    lora_mark: Mark | None = None
    merged: str = ""
    group: GroupCost | None = None
    seats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PollReply:
    """The dispatcher's answer to a poll.

    Attributes:
        known: False asks the replica to drop all rows and register again.
        aborts: request ids whose rows must go at the next step boundary. They mean rows held
            before this reply: apply aborts first, then add the leases.
        moved: those of ``aborts`` that have not ended; another replica may need their states.
        preempted: request ids whose leases are to be returned at the next step boundary, with
            their states; a request that is about to be decoded stays. The same reply may lease
            that many requests despite no free slots.
        adopted: new fences, by request id, for leases of another dispatcher, or that were taken
            for lost.
        peers: the workers that it may call; None if it has this version.
        settings: to be applied from now on; None if it has this version.
        loras: what has changed of what a store of LoRAs is to have, since :attr:`Poll.lora_mark`;
            None if there is nothing that it must know.
        lora_mark: how far it is known what the store has; with the answer to :attr:`Poll.loras`.
        others_wait: asks a merged replica to put its model's own weights back: requests wait that
            it may not be leased, and no other replica will take them soon.
    """

    known: bool
    leases: tuple[Lease, ...] = ()
    aborts: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    adopted: Mapping[str, Fence] = field(default_factory=dict)
    peers: Directory | None = None
    settings: WorkerSettings | None = None
    loras: LoraOrders | None = None
    lora_mark: Mark | None = None
    others_wait: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """An image of a leased request is made.

    Attributes:
        small: the image for a discriminator, of a candidate.
    """

    request_id: str
    fence: Fence
    result: ImageResult
    small: SmallImage | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """An image of a leased request is scored.

    Attributes:
        confidence: that it is right for its prompt, in [0, 1].
    """

    request_id: str
    fence: Fence
    confidence: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A leased request ended with an error of its own."""

    request_id: str
    fence: Fence
    failure: Failure


@dataclass(frozen=True, slots=True)
class Returned:
    """A replica returns a lease.

    Attributes:
        steps_done: denoising steps in the state that is in the store now; 0 without one.
    """

    request_id: str
    fence: Fence
    steps_done: int


ReplicaEvent = Finished | Scored | Failed | Returned


@dataclass(frozen=True, slots=True)
class Shown:
    """A preview of a leased request. Lost ones are not sent again."""

    request_id: str
    fence: Fence
    preview: Preview
