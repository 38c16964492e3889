"""Durable jobs, as gateways, dispatcher and store share them; a job is one API call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ray_cluster.policies.types import Offer
from ray_cluster.protocol.outcomes import CascadeAnswer, Deferred, Progress
from ray_cluster.requests import Failure, ImageFormat, ImageRequest, Timing

JobState = Literal["queued", "running", "completed", "failed", "cancelled"]
JOB_STATES: tuple[JobState, ...] = get_args(JobState)
FINAL_STATES: frozenset[JobState] = frozenset({"completed", "failed", "cancelled"})
# callers of an open service are told apart by it, and what follows; no client has a space
ADDRESS = "address "


def client_of(caller: str) -> str:
    """Return whose jobs a caller sees: on an open service all addresses are one client, ''."""
    return "" if caller.startswith(ADDRESS) else caller


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A finished image of a job.

    Attributes:
        file_id: name under which the result store has it.
        timing: None where a dispatcher died before it could be noted.
        num_steps: that it was made with; None where they are those of its request.
        cascade: how it was routed, if it was and is known.
        steps_by_degree: see :class:`ray_cluster.requests.ImageResult`.
    """

    file_id: str
    image_format: ImageFormat
    num_bytes: int
    timing: Timing | None
    num_steps: int | None = None
    cascade: CascadeAnswer | None = None
    steps_by_degree: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A durable job at one instant. Instants are Unix time, as they outlive processes.

    Attributes:
        job_id: unguessable.
        client: whose it is: a name or a digest of the API key; empty on an open service.
        requests: one per image.
        slo_s: seconds from ``created_s`` to the deadline.
        idempotency_key: the client's own name for the call; None without one.
        body_digest: tells whether another call with that key is the same call.
        attempts: leases that its ended images took.
        images: by position of its request; None for those not finished.
        error: why it failed.
        deferred: what cascades have decided over those of its images that are made anew.
    """

    job_id: str
    client: str
    requests: tuple[ImageRequest, ...]
    slo_s: float
    created_s: float
    body_digest: str
    idempotency_key: str | None = None
    state: JobState = "queued"
    finished_s: float | None = None
    attempts: int = 0
    images: tuple[StoredImage | None, ...] = ()
    error: Failure | None = None
    deferred: tuple[Deferred, ...] = ()

    @property
    def caller(self) -> str:
        """Whose share its images take."""
        return self.requests[0].sharer or self.client

    @property
    def rank(self) -> tuple[float, str]:
        """Its place among jobs by age, the oldest first."""
        return self.created_s, self.job_id

    @property
    def is_final(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.state in FINAL_STATES


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as it is.

    Attributes:
        progress: while it is open, how far each of its images is; None for one that has ended.
        num_made: of those that have ended, how many were made.
    """

    job: Job
    progress: tuple[Progress | None, ...] = ()
    num_made: int = 0

    @property
    def version(self) -> str:
        """Differs whenever what clients see of the job differs.

        It contains all that was seen, so that any gateway and any later dispatcher can compare.
        """
        open_images = [one for one in self.progress if one is not None]
        steps = sum(one.steps_done for one in open_images)
        waits = [one.position for one in open_images if one.position is not None]
        position = min(waits, default="-")
        stages = "".join(one.stage[0] for one in open_images if one.stage)
        progress = f"{len(open_images)}.{stages}{steps}.{position}.{self.num_previews}"
        return f"{self.job.state}.{progress}"

    @property
    def num_previews(self) -> int:
        """Previews of its open images so far, shown or not."""
        previews = [one.preview for one in self.progress if one is not None]
        return sum(one.index + 1 for one in previews if one is not None)


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs of a client, the newest first: as many as were asked for, or as one message holds.

    Attributes:
        has_more: whether older ones follow.
    """

    views: tuple[JobView, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Creation:
    """The answer to a new job.

    Attributes:
        view: the job: the new one, or the earlier one of its idempotency key; None if refused.
        is_new: False for an earlier one.
        offer: admission's decision about a new one.
    """

    view: JobView | None
    is_new: bool
    offer: Offer


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Asks for a page of a client's jobs, the newest first.

    Attributes:
        client: who asks, see :func:`client_of`.
        state: only jobs in this state.
        after: the id of the last job of the page before.
    """

    client: str
    state: JobState | None = None
    limit: int = 20
    after: str | None = None
