"""What gateways and replicas call in the dispatcher of their cell."""

from __future__ import annotations

from typing import Protocol

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import Offer
from ray_cluster.protocol.calling.interface import raises
from ray_cluster.protocol.cell_view import CellView
from ray_cluster.protocol.controller import PlanCalls
from ray_cluster.protocol.jobs import Creation, Job, JobPage, JobQuery, JobView
from ray_cluster.protocol.leases import Poll, PollReply, Registration, ReplicaEvent, Shown
from ray_cluster.protocol.loras import Lora, LoraAdded, LoraLookup, LoraStatus
from ray_cluster.protocol.outcomes import ImageUpdate, Outcome, Submission
from ray_cluster.protocol.settings import GatewaySettings, WorkerSettings
from ray_cluster.requests import ImageRequest, ModelProfile, PromptTokenizer


class ImageCalls(Protocol):
    """Images whose clients wait for them."""

    async def submit(
        self, requests: tuple[ImageRequest, ...], client: str, wait_s: float
    ) -> Submission:
        """Ask for admission of a whole group, and wait for its first outcomes if accepted.

        Accepted means that all of the group is queued. Not accepted is answered at once.

        Args:
            client: whose it is; how many images one may have in flight is bounded.
        """
        ...

    async def estimate(self, requests: tuple[ImageRequest, ...], client: str) -> Offer:
        """Return what :meth:`submit` would be answered now; nothing is queued."""
        ...

    async def wait(self, request_ids: tuple[str, ...], wait_s: float) -> dict[str, Outcome]:
        """Return the outcomes that are there, as soon as there is one, or nothing at the timeout.

        A call also shows that the client of these attached requests still waits. An outcome is
        returned once; an id that the dispatcher does not know is ``lost``.
        """
        ...

    async def watch(self, request_id: str, seen: int, wait_s: float) -> ImageUpdate:
        """Return a request's outcome, or a preview after ``seen``; else like :meth:`wait`."""
        ...

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """Abort these requests; ids that are unknown or done are ignored."""
        ...

    async def models(self) -> dict[str, ModelProfile]:
        """Return the profile of every model that a replica ever registered, by name."""
        ...

    async def prompt_tokenizers(self, model: str) -> tuple[PromptTokenizer, ...]:
        """Return the tokenizers that count the prompts of a model; none where nobody knows."""
        ...


class JobCalls(Protocol):
    """Durable jobs.

    A client is who calls: on an open service an address, which all see the same jobs.
    """

    @raises(JobStoreUnavailable)
    async def create_job(self, job: Job) -> Creation:
        """Have a job accepted, once for its client's idempotency key, or refused."""
        ...

    @raises(JobStoreUnavailable)
    async def job(self, client: str, job_id: str, wait_s: float = 0.0) -> JobView | None:
        """Return a client's job, once it has ended or ``wait_s`` are over; None for another's."""
        ...

    @raises(JobStoreUnavailable)
    async def job_change(
        self, client: str, job_id: str, seen: str, wait_s: float
    ) -> JobView | None:
        """Return a client's job once its version is not ``seen``, or ``wait_s`` are over."""
        ...

    @raises(JobStoreUnavailable)
    async def jobs(self, query: JobQuery) -> JobPage:
        """Return a page of a client's jobs, the newest first."""
        ...

    @raises(JobStoreUnavailable)
    async def cancel_job(self, client: str, job_id: str) -> JobView | None:
        """End a client's job now; one that has ended stays as it is."""
        ...


class CellCalls(Protocol):
    """The cell as a whole."""

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        """Return the metrics of the whole cell, the caller's present ones included."""
        ...

    async def report_metrics(self, process_id: str, own: Snapshot) -> None:
        """Report the caller's present metrics."""
        ...

    async def warnings(self) -> tuple[str, ...]:
        """Return what is wrong though the dispatcher answers."""
        ...

    @raises(JobStoreUnavailable)
    async def starting(self) -> tuple[str, ...]:
        """Return models known from an earlier dispatcher of which no replica has registered yet.

        Raises:
            JobStoreUnavailable: another cell has taken over from this one.
        """
        ...

    async def view(self, after_s: float) -> CellView:
        """Return the cell as it is, and its history after an instant of Unix time."""
        ...

    async def undeployed(self) -> tuple[str, ...]:
        """Return models in the settings that nobody has deployed."""
        ...

    async def settings(self, process_id: str, seen: str, wait_s: float) -> GatewaySettings | None:
        """Return the settings once their version is not ``seen``; None after ``wait_s``.

        The call also shows that this process has applied the version ``seen``: keep one open.
        """
        ...


class LoraCalls(Protocol):
    """The registry of LoRAs."""

    @raises(JobStoreUnavailable)
    async def add_lora(self, lora: Lora) -> LoraAdded:
        """Register a LoRA; once this returns it is written. The same one twice is no error.

        Its id and instant are given here.
        """
        ...

    async def loras(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        """Return LoRAs by name, those after a name; from the first on if it is empty.

        At most :data:`~ray_cluster.protocol.loras.MAX_LORAS_AT_ONCE`.
        """
        ...

    async def find_loras(self, names: tuple[str, ...]) -> LoraLookup:
        """Return the LoRAs of these names; for the first that there is not, names like it."""
        ...

    @raises(JobStoreUnavailable)
    async def remove_lora(self, name: str) -> LoraStatus | None:
        """Forget a LoRA once no open request uses it, and offer it to none from now on.

        None if there is none of that name, or it has gone before its turn came.
        """
        ...


class DispatcherClient(ImageCalls, JobCalls, CellCalls, LoraCalls, PlanCalls, Protocol):
    """A gateway's way to the one dispatcher of its cell.

    Every method raises :class:`~ray_cluster.errors.DispatcherUnavailable` when the dispatcher is
    starting, dead or unreachable, those of jobs :class:`~ray_cluster.errors.JobStoreUnavailable`
    when their store is, and nothing else: the caller gets 503 and may try again.
    """


class DispatcherLink(Protocol):
    """A replica's way to the dispatcher; every call may raise DispatcherUnavailable."""

    async def pool_settings(self, pool: str) -> WorkerSettings | None:
        """Return what a replica of a pool starts with; None if the settings have no such pool."""
        ...

    async def register(self, registration: Registration) -> int:
        """Register a replica; return the epoch that its polls must carry."""
        ...

    async def unregister(self, replica_id: str) -> None:
        """Remove a replica; leases that it has not returned go back to the queue."""
        ...

    async def poll(self, poll: Poll, wait_s: float) -> PollReply:
        """Return leases and aborts, as soon as there are any."""
        ...

    async def report(
        self, replica_id: str, events: tuple[ReplicaEvent, ...]
    ) -> tuple[str, ...] | None:
        """Report ends of leases; return the ids whose fence was stale.

        None if the replica is not known, and nothing was accepted: register, have the leases
        adopted by a poll, and report again.
        """
        ...

    async def show(self, replica_id: str, shown: Shown) -> None:
        """Send a preview."""
        ...
