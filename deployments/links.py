"""The dispatcher, for gateways and replicas: Serve finds it, and calls go to it directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, cast

from grpc import RpcError  # type: ignore[import-untyped]
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.jobs import Creation, Job, JobQuery, JobView
from ray_cluster.protocol.leases import Poll, PollReply, Registration, ReplicaEvent, Shown
from ray_cluster.protocol.outcomes import Outcome, Sight, Submission
from ray_cluster.protocol.rpc import RpcAddress, RpcClient, RpcFailed
from ray_cluster.protocol.timeouts import within
from ray_cluster.requests import ImageRequest, ModelProfile

# longer than any call is held
_GRACE_S = 30.0

FRONT = "front"
DISPATCHER = "Dispatcher"


class DispatcherHandle:
    """Calls the cell's dispatcher; a call that gets no answer raises DispatcherUnavailable.

    Only its address is asked for through Serve, once in the life of a dispatcher: a call through
    Serve costs both ends some milliseconds of CPU time, and a request takes three.

    Implements ``DispatcherClient`` (for gateways) and ``DispatcherLink`` (for replicas).

    Args:
        patience_s: longest wait for an answer beyond what a long poll is held.
        poll_s: how long the dispatcher holds a lease poll.
    """

    def __init__(self, *, patience_s: float, poll_s: float) -> None:
        self._patience_s = patience_s
        self._poll_s = poll_s
        self._handle: DeploymentHandle[Any] | None = None
        self._client: RpcClient | None = None
        self._finding = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def submit(
        self, requests: Sequence[ImageRequest], wait_s: float, client: str
    ) -> Submission:
        """Ask for admission of the whole group, and wait for its first outcomes."""
        reply = await self._call("submit", tuple(requests), wait_s, client, held_s=wait_s)
        return cast(Submission, reply)

    async def wait(self, request_ids: Sequence[str], timeout_s: float) -> dict[str, Outcome]:
        """Return the outcomes that are there, as soon as there is one."""
        reply = await self._call("wait", tuple(request_ids), timeout_s, held_s=timeout_s)
        return cast(dict[str, Outcome], reply)

    async def watch(self, request_id: str, seen: int, timeout_s: float) -> Sight:
        """Return how a request ended, or a preview after number ``seen``."""
        reply = await self._call("watch", request_id, seen, timeout_s, held_s=timeout_s)
        return cast(Sight, reply)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Give these requests up."""
        await self._call("abort", tuple(request_ids))

    async def create_job(self, job: Job) -> Creation:
        """Have a job accepted, once for its idempotency key."""
        return cast(Creation, await self._call("create_job", job))

    async def job(self, client: str, job_id: str, wait_s: float = 0.0) -> JobView | None:
        """Return a job, once it has ended or ``wait_s`` are over."""
        reply = await self._call("job", client, job_id, wait_s, held_s=wait_s)
        return cast(JobView | None, reply)

    async def job_change(
        self, client: str, job_id: str, seen: str, wait_s: float
    ) -> JobView | None:
        """Return a job once its version is not ``seen``, or ``wait_s`` are over."""
        reply = await self._call("job_change", client, job_id, seen, wait_s, held_s=wait_s)
        return cast(JobView | None, reply)

    async def jobs(self, query: JobQuery) -> list[JobView]:
        """Return a page of a client's jobs."""
        return cast(list[JobView], await self._call("jobs", query))

    async def cancel_job(self, client: str, job_id: str) -> JobView | None:
        """End a job now."""
        return cast(JobView | None, await self._call("cancel_job", client, job_id))

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        """Return the metrics of the whole cell, the caller's present ones included."""
        return cast(Snapshot, await self._call("metrics", process_id, own))

    async def tell_metrics(self, process_id: str, own: Snapshot) -> None:
        """Hand over the caller's present metrics."""
        await self._call("tell_metrics", process_id, own)

    async def warnings(self) -> Sequence[str]:
        """Return what is wrong though the dispatcher answers."""
        return cast(Sequence[str], await self._call("warnings"))

    async def models(self) -> Mapping[str, ModelProfile]:
        """Return the profile of every model that a replica has registered."""
        return cast(Mapping[str, ModelProfile], await self._call("models"))

    async def register(self, registration: Registration) -> int:
        """Take the replica in; return the epoch that its polls must carry."""
        return cast(int, await self._call("register", registration))

    async def unregister(self, replica_id: str) -> None:
        """Let the replica go."""
        await self._call("unregister", replica_id)

    async def poll(self, poll: Poll) -> PollReply:
        """Return leases and aborts; a long poll."""
        return cast(PollReply, await self._call("poll", poll, held_s=self._poll_s))

    async def report(
        self, replica_id: str, events: Sequence[ReplicaEvent]
    ) -> tuple[str, ...] | None:
        """Take in what happened; return the ids whose fence was stale, None if unknown here."""
        reply = await self._call("report", replica_id, tuple(events))
        return cast(tuple[str, ...] | None, reply)

    async def show(self, replica_id: str, shown: Shown) -> None:
        """Take in a preview."""
        await self._call("show", replica_id, shown)

    async def _call(self, method: str, *args: object, held_s: float = 0.0) -> object:
        client: RpcClient | None = None
        try:
            client = await self._connected()
            return await within(held_s + self._patience_s, client.call(method, *args))
        except RpcFailed as error:
            if error.is_refused:
                self._leave(client)
            raise DispatcherUnavailable(f"{method}: {error}") from error
        except (RayError, RayServeException, RpcError, TimeoutError) as error:
            self._leave(client)
            raise DispatcherUnavailable(f"{method}: {type(error).__name__}: {error}") from error

    async def _connected(self) -> RpcClient:
        if self._client is not None:
            return self._client
        return await within(self._patience_s, self._find())

    async def _find(self) -> RpcClient:
        async with self._finding:
            if self._client is None:
                if self._handle is None:
                    # over gRPC: by reference, Ray blocks the dispatcher's event loop at the end
                    # of every call until the caller has acknowledged it, so that one frozen
                    # caller would stop the whole cell
                    handle = serve.get_deployment_handle(DISPATCHER, FRONT)
                    self._handle = handle.options(_by_reference=False)
                address = await cast(Awaitable[RpcAddress], self._handle.address.remote())
                self._client = RpcClient(address)
            return self._client

    def _leave(self, client: RpcClient | None) -> None:
        """Ask for the dispatcher's address again: it may be another one by now."""
        if client is None or client is not self._client:
            return
        self._client = None
        # other calls may yet be answered
        task = asyncio.create_task(client.close(_GRACE_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
