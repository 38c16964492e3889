"""A discriminator as the dispatcher sees it: it registers, pulls leases on images, answers scores.

Knows the lease protocol and one scorer; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.scorers.scorer import Scorer
from ray_cluster.errors import (
    REQUEST_ERRORS,
    DeviceBroken,
    DispatcherUnavailable,
    RequestFailed,
)
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Failed, Lease, Poll, PollReply, Registration, Scored
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica.delivery import failure_of
from ray_cluster.replica.denoise.metrics import ScorerMetrics
from ray_cluster.replica.held_leases import HeldLeases
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.poller import LeasePoller, check_running
from ray_cluster.replica.unexpected import unexpected
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)


class ScorerAgent:
    """Keeps one scorer busy with leases, a batch at a time in a thread of its own.

    A lease that it cannot score ends as failed, and the dispatcher decides without a confidence.

    Args:
        registration: sent to each dispatcher.
        link: the dispatcher.
        clock: monotonic seconds.
        max_silence_s: longest batch that still counts as alive.
        settings: those of the registration; later ones come with replies to polls.
    """

    def __init__(
        self,
        registration: Registration,
        scorer: Scorer,
        *,
        link: DispatcherLink,
        clock: Callable[[], float],
        max_silence_s: float = 60.0,
        settings: WorkerSettings | None = None,
    ) -> None:
        self._registration = registration
        self._capacity = Capacity(registration.max_in_flight, registration.max_batch)
        self._settings_version = "" if settings is None else settings.version
        self._scorer = scorer
        self._link = link
        self._clock = clock
        self._max_silence_s = max_silence_s
        self._metrics = ScorerMetrics(registration.model)
        self._log = ReplicaLog(registration.replica_id)
        self._leases = HeldLeases(link, registration.replica_id, lambda _request_id: None)
        self._polls = LeasePoller(
            link,
            registration,
            make_poll=self._poll,
            on_reply=self._on_reply,
            poll_s=DispatchConfig().poll_s if settings is None else settings.poll_s,
        )
        # one thread: torch's settings and handles are per thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._waiting: dict[str, Lease] = {}
        self._has_work = asyncio.Event()
        self._busy_since_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start polling, scoring and reporting on the running loop."""
        self._tasks = [
            asyncio.create_task(self._polls.poll_forever(), name="the polling task"),
            asyncio.create_task(self._leases.report_forever(), name="the reporting task"),
            asyncio.create_task(self._score_forever(), name="the scoring task"),
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot()

    def check_alive(self) -> None:
        """Raise RuntimeError when a task has died or a batch hangs."""
        check_running(self._tasks)
        since_s = self._busy_since_s
        if since_s is not None and self._clock() - since_s > self._max_silence_s:
            raise RuntimeError(f"a batch is scored for {self._clock() - since_s:.1f} s")

    async def drain(self) -> None:
        """Stop, and leave what is not scored yet to others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._leases.clear()
        with contextlib.suppress(DispatcherUnavailable):
            await self._leases.report()
            await self._link.unregister(self._registration.replica_id)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _poll(self, epoch: int) -> Poll:
        return Poll(
            replica_id=self._registration.replica_id,
            epoch=epoch,
            num_free=max(0, self._capacity.max_in_flight - len(self._leases)),
            # nothing is done in part
            steps_done_by_id=self._leases.progress(dict.fromkeys(self._held, 0)),
            metrics=self._metrics.snapshot(),
            settings_version=self._settings_version,
            capacity=self._capacity,
        )

    @property
    def _held(self) -> list[str]:
        return [lease.request.request_id for lease in self._leases]

    def _on_reply(self, reply: PollReply) -> None:
        if reply.settings is not None:
            self._capacity = Capacity(reply.settings.max_in_flight, reply.settings.max_batch)
            self._polls.poll_s = reply.settings.poll_s
            self._settings_version = reply.settings.version
        for request_id in reply.aborts:
            self._leases.drop(request_id)
            self._waiting.pop(request_id, None)
        self._leases.adopt(reply.adopted)
        for lease in reply.leases:
            self._leases.drop(lease.request.request_id)
            self._leases.add(lease)
            self._waiting[lease.request.request_id] = lease
            self._has_work.set()

    async def _score_forever(self) -> None:
        while True:
            await self._has_work.wait()
            batch = list(self._waiting.values())[: self._capacity.max_batch]
            for lease in batch:
                del self._waiting[lease.request.request_id]
            if not self._waiting:
                self._has_work.clear()
            if batch:
                await self._score(batch)

    async def _score(self, leases: Sequence[Lease]) -> None:
        self._busy_since_s = started_s = self._clock()
        try:
            confidences = await self._in_thread(leases)
        except DeviceBroken:
            raise
        # whatever else a scorer raises ends the request that it is of, not the replica
        except Exception as error:  # noqa: BLE001
            raise_if_broken(error)
            failure = error
        else:
            self._metrics.scored(confidences, self._clock() - started_s)
            for lease, confidence in zip(leases, confidences, strict=True):
                request = lease.request
                self._leases.end(request, Scored(request.request_id, lease.fence, confidence))
            return
        finally:
            self._busy_since_s = None
        if len(leases) > 1:
            for lease in leases:
                await self._score([lease])
        else:
            self._fail(leases[0], failure)

    async def _in_thread(self, leases: Sequence[Lease]) -> list[float]:
        prompts = [lease.request.prompt for lease in leases]
        images = [lease.scored for lease in leases if lease.scored is not None]
        if len(images) < len(leases):
            raise RequestFailed("a lease on a score came without an image", "score")
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._scorer.score, prompts, images)
        if len(found) != len(leases):
            raise RequestFailed(f"{len(found)} scores for {len(leases)} images", "score")
        return found

    def _fail(self, lease: Lease, error: Exception) -> None:
        failure = failure_of(lease.request.request_id, _failed(error, lease.request))
        self._log.failed(lease.request, failure)
        self._leases.end(lease.request, Failed(failure.request_id, lease.fence, failure))


def _failed(error: Exception, request: ImageRequest) -> RequestFailed:
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, REQUEST_ERRORS):
        return RequestFailed(f"{type(error).__name__}: {error}", "score")
    return unexpected(error, request, "score")
