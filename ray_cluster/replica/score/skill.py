"""What a discriminator does: it takes leases on images, and answers scores.

Knows the lease protocol and one scorer; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.scorers.scorer import Scorer
from ray_cluster.errors import REQUEST_ERRORS, DeviceBroken, RequestFailed
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Failed, Lease, Registration, Scored
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.denoise.metrics import ScorerMetrics
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.skill import Shell, Skill
from ray_cluster.replica.unexpected import failure_of, unexpected
from ray_cluster.requests import ImageRequest


class ScoreSkill(Skill):
    """Keeps one scorer busy with leases, a batch at a time in a thread of its own.

    A lease that it cannot score ends as failed, and the dispatcher decides without a confidence.

    Args:
        clock: monotonic seconds.
        max_silence_s: longest batch that still counts as alive.
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
        super().__init__(registration, link, settings)
        self._scorer = scorer
        self._clock = clock
        self._max_silence_s = max_silence_s
        self._metrics = ScorerMetrics(registration.model)
        self._log = ReplicaLog(registration.replica_id)
        # one thread: torch's settings and handles are per thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._waiting: dict[str, Lease] = {}
        self._has_work = asyncio.Event()
        self._busy_since_s: float | None = None

    def start(self, _shell: Shell) -> Sequence[asyncio.Task[None]]:
        """Begin to score what is leased."""
        return (asyncio.create_task(self._score_forever(), name="the scoring task"),)

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot()

    def check_alive(self) -> None:
        """Raise RuntimeError when a batch hangs."""
        since_s = self._busy_since_s
        if since_s is not None and self._clock() - since_s > self._max_silence_s:
            raise RuntimeError(f"a batch is scored for {self._clock() - since_s:.1f} s")

    async def close(self) -> None:
        """End the thread; what is not scored yet is left to others."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def abort(self, request_id: str, *, is_ended: bool) -> None:  # noqa: ARG002 - it stores nothing
        """Score an image no more, unless its batch has begun."""
        self.leases.drop(request_id)
        self._waiting.pop(request_id, None)

    def take(self, lease: Lease) -> None:
        """Score an image with the next batch."""
        self.leases.add(lease)
        self._waiting[lease.request.request_id] = lease
        self._has_work.set()

    async def _score_forever(self) -> None:
        while True:
            await self._has_work.wait()
            batch = list(self._waiting.values())[: self.capacity.max_batch]
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
                self.leases.end(request, Scored(request.request_id, lease.fence, confidence))
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
        self.leases.end(lease.request, Failed(failure.request_id, lease.fence, failure))


def _failed(error: Exception, request: ImageRequest) -> RequestFailed:
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, REQUEST_ERRORS):
        return RequestFailed(f"{type(error).__name__}: {error}", "score")
    return unexpected(error, request, "score")
