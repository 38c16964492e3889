"""A model replica as the dispatcher sees it: it registers, pulls leases, reports, and drains.

Knows the lease protocol and one engine runner; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ray_cluster.delivery import Delivery
from ray_cluster.engine.events import Broken, Decoded, Died, RunnerEvent, Stepped
from ray_cluster.engine.runner import EngineRunner
from ray_cluster.errors import DispatcherUnavailable, InvalidRequest, RequestFailed
from ray_cluster.lease_ends import LeaseEnds, back_off, failure_of, restored_state, returned
from ray_cluster.leases import (
    DispatcherLink,
    Failed,
    Fence,
    Finished,
    Lease,
    Poll,
    Registration,
    ReplicaEvent,
)
from ray_cluster.logs import bound, fields_of
from ray_cluster.metrics.roles import ReplicaMetrics
from ray_cluster.metrics.snapshot import Snapshot
from ray_cluster.policies.cost_model import CostResidual, corrected, observe, step_s
from ray_cluster.work_log import WorkLog

logger = logging.getLogger(__name__)

_CODING_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Constants of one replica.

    Attributes:
        max_silence_s: longest denoising step that still counts as alive.
    """

    max_silence_s: float = 120.0


class ReplicaAgent:
    """Keeps one runner busy with leases.

    Owns the leases it holds and the ends not yet acknowledged. Everything but
    :meth:`on_runner_event` runs on one event loop, and nothing computes there.

    Args:
        registration: what to register with; its step cost is corrected by observation.
        make_runner: builds the runner around the callback for its events.
        delivery: codes finished images and puts them where they belong.
        link: the dispatcher.
        clock: monotonic seconds, the runner's too.
    """

    def __init__(
        self,
        registration: Registration,
        *,
        make_runner: Callable[[Callable[[RunnerEvent], None]], EngineRunner],
        delivery: Delivery,
        link: DispatcherLink,
        clock: Callable[[], float],
        limits: ReplicaLimits = ReplicaLimits(),
    ) -> None:
        self._registration = registration
        self._runner = make_runner(self.on_runner_event)
        self._delivery = delivery
        self._link = link
        self._clock = clock
        self._limits = limits
        self._residual = CostResidual()
        self._metrics = ReplicaMetrics(registration.profile.model)
        self._log = WorkLog(registration.replica_id)
        self._leases: dict[str, Lease] = {}
        self._ends = LeaseEnds(link, registration.replica_id)
        self._loops: list[asyncio.Task[None]] = []
        self._codings: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = False
        self._death: Died | None = None
        self._giving_up: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the runner's threads and the polling and reporting tasks on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._runner.start()
        self._loops = [
            asyncio.create_task(self._poll_forever(), name="the polling task"),
            asyncio.create_task(self._ends.report_forever(), name="the reporting task"),
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot()

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread or a task of the replica has died or hangs."""
        if self._death is not None:
            raise RuntimeError(str(self._death))
        self._runner.check_alive(self._limits.max_silence_s)
        for task in self._loops:
            if task.done() and not task.cancelled():
                raise RuntimeError(f"{task.get_name()} has died: {task.exception()}")

    async def drain(self) -> None:
        """Export every row at the next step boundary, hand all leases back, and stop.

        Images that are being coded are finished first; other replicas go on from the rest.
        """
        self._is_draining = True
        if self._giving_up is not None:
            await self._giving_up
            return
        exported = await asyncio.to_thread(self._runner.export_all)
        await self._end_tasks()
        state_by_id = {item.request.request_id: item.state for item in exported}
        for request_id, lease in self._leases.items():
            state = state_by_id.get(request_id)
            self._ends.add(lease, returned(lease, state))
            self._log.returned(lease.request, state)
        await self._sign_off()

    def _on_death(self, death: Died) -> None:
        """Leave for good: without its engine a replica would only hold leases up."""
        if self._is_draining:
            return
        self._is_draining = True
        self._death = death
        logger.error("%s; this replica lets its leases go", death)
        self._giving_up = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        """Have the dispatcher count the leases as lost: one of them may be what ended the engine.

        A request that ends every engine is thus tried a bounded number of times.
        """
        await self._end_tasks()
        await self._sign_off()

    async def _end_tasks(self) -> None:
        for task in self._loops:
            task.cancel()
        if self._codings:
            await asyncio.wait(self._codings, timeout=_CODING_GRACE_S)
        for task in self._codings:
            task.cancel()
        await asyncio.gather(*self._loops, *self._codings, return_exceptions=True)

    async def _sign_off(self) -> None:
        self._leases.clear()
        with contextlib.suppress(DispatcherUnavailable):
            await self._ends.report()
            await self._link.unregister(self._registration.replica_id)
        await asyncio.to_thread(self._runner.stop)

    def on_runner_event(self, event: RunnerEvent) -> None:
        """Take an event in from one of the runner's threads."""
        if isinstance(event, Stepped):
            report = event.report
            predicted_s = step_s(self._registration.step_cost, report.megapixels)
            self._residual = observe(
                self._residual, predicted_s=predicted_s, observed_s=report.duration_s
            )
            self._metrics.stepped(seconds=report.duration_s, num_images=len(report.stepped))
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._settle, event)

    async def _poll_forever(self) -> None:
        epoch = await self._register()
        failures = 0
        while not self._is_draining:
            try:
                reply = await self._link.poll(self._poll(epoch))
            except DispatcherUnavailable as error:
                await back_off(failures, error)
                failures += 1
                continue
            failures = 0
            if not reply.known:
                logger.warning("the dispatcher does not know this replica; registering again")
                epoch = await self._register()
                continue
            for request_id in reply.aborts:
                self._drop(request_id)
            self._adopt(reply.adopted)
            for lease in reply.leases:
                self._take(lease)

    async def _register(self) -> int:
        failures = 0
        while True:
            try:
                return await self._link.register(self._registration)
            except DispatcherUnavailable as error:
                await back_off(failures, error)
                failures += 1

    def _poll(self, epoch: int) -> Poll:
        steps_done = self._runner.steps_done_by_id
        return Poll(
            replica_id=self._registration.replica_id,
            epoch=epoch,
            num_free=self._registration.max_in_flight - len(self._leases),
            steps_done_by_id={
                lease.request.request_id: steps_done.get(
                    lease.request.request_id, lease.request.num_steps
                )
                for lease in (*self._ends.leases, *self._leases.values())
            },
            step_cost=corrected(self._registration.step_cost, self._residual),
            metrics=self._metrics.snapshot(),
        )

    def _take(self, lease: Lease) -> None:
        request = lease.request
        self._drop(request.request_id)
        self._leases[request.request_id] = lease
        now_s = self._clock()
        deadline_s = now_s + lease.deadline_in_s
        state = restored_state(
            lease,
            device=self._runner.device,
            arrival_s=now_s - lease.queued_s,
            deadline_s=deadline_s,
        )
        self._log.started(lease, state)
        self._runner.submit(request, deadline_s=deadline_s, queued_s=lease.queued_s, state=state)

    def _drop(self, request_id: str) -> None:
        """Drop the row of a request, and what was to be reported of earlier leases on it."""
        if (lease := self._leases.pop(request_id, None)) is not None:
            self._log.dropped(lease.request)
        self._runner.abort(request_id)
        self._ends.drop(request_id)

    def _adopt(self, fence_by_id: Mapping[str, Fence]) -> None:
        """Go on under new fences with what the dispatcher took for lost, or never knew of."""
        for request_id, fence in fence_by_id.items():
            if (lease := self._leases.get(request_id)) is not None:
                self._leases[request_id] = replace(lease, fence=fence)
        self._ends.adopt(fence_by_id)

    def _settle(self, event: Decoded | Broken | Died) -> None:
        if isinstance(event, Died):
            self._on_death(event)
            return
        lease = self._leases.get(event.request.request_id)
        if lease is None or lease.request is not event.request:
            return
        if isinstance(event, Decoded):
            task = asyncio.create_task(self._code(lease, event))
            self._codings.add(task)
            task.add_done_callback(self._codings.discard)
        else:
            self._fail(lease, event.error)

    async def _code(self, lease: Lease, event: Decoded) -> None:
        request = event.request
        try:
            # for what the coder and the result store write
            with bound(**fields_of(request)):
                result = await self._delivery.deliver(event)
        except RequestFailed as error:
            self._fail(lease, error)
            return
        self._log.finished(request, result.timing)
        self._finish(lease, Finished(request.request_id, lease.fence, result))

    def _fail(self, lease: Lease, error: RequestFailed | InvalidRequest) -> None:
        request_id = lease.request.request_id
        failure = failure_of(request_id, error)
        self._log.failed(lease.request, failure)
        self._finish(lease, Failed(request_id, lease.fence, failure))

    def _finish(self, lease: Lease, event: ReplicaEvent) -> None:
        request_id = lease.request.request_id
        held = self._leases.get(request_id)
        # the same lease, perhaps under a newer fence
        if held is not None and held.request is lease.request:
            del self._leases[request_id]
            self._ends.add(held, replace(event, fence=held.fence))
