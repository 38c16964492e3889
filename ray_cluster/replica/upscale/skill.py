"""What an upscaler does: it takes leases on finished images, and enlarges them.

Knows the lease protocol, the result store and processes that code images; nothing of torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray_cluster.errors import MODEL_ERRORS, RequestFailed
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Failed, Finished, Lease, Registration, Returned
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.results import Results, fair_client
from ray_cluster.replica.skill import Skill
from ray_cluster.replica.unexpected import failing_alone, failure_of
from ray_cluster.requests import ImageRequest, ImageResult, Timing


class UpscaleSkill(Skill):
    """Enlarges each image that is leased, at once; what a replica holds is bounded by its capacity.

    Args:
        coder: its processes do the work.
        clock: seconds.
    """

    def __init__(
        self,
        registration: Registration,
        coder: ImageCoder,
        results: Results,
        *,
        link: DispatcherLink,
        clock: Callable[[], float],
        settings: WorkerSettings | None = None,
    ) -> None:
        super().__init__(registration, link, settings)
        self._coder = coder
        self._results = results
        self._clock = clock
        self._log = ReplicaLog(registration.replica_id)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, lease: Lease) -> None:
        """Begin to enlarge an image."""
        request_id = lease.request.request_id
        self.abort(request_id, is_ended=False)
        self.leases.add(lease)
        task = asyncio.create_task(self._work(lease), name=f"the image of {request_id}")
        self._tasks[request_id] = task
        task.add_done_callback(lambda done: self._forget_task(request_id, done))

    def _forget_task(self, request_id: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is done:
            del self._tasks[request_id]

    def abort(self, request_id: str, *, is_ended: bool) -> None:
        """Enlarge an image no more."""
        self.leases.drop(request_id)
        if is_ended:
            self._results.note_end(request_id)
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    async def release(self, end_tasks: Callable[[], Awaitable[None]]) -> None:
        """Return what is not enlarged yet: a worker that is to stop counts as no lost one."""
        await end_tasks()
        for lease in self.leases:
            returned = Returned(lease.request.request_id, lease.fence, steps_done=0)
            self.leases.end(lease.request, returned)

    async def end_tasks(self) -> None:
        """Leave what is not done to others."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop_writing(self) -> None:
        """Write no images any more."""
        await self._results.settle()

    async def _work(self, lease: Lease) -> None:
        request, began_s = lease.request, self._clock()
        try:
            with failing_alone(request, "upscale"), self._results.work_on(request.request_id):
                data = await self._enlarged(request, lease.source)
                num_bytes = len(data)
                if request.output.is_stored:
                    await self._results.put(request, request.file_id, data)
                    data = b""
        except RequestFailed as error:
            failure = failure_of(request.request_id, error)
            self._log.failed(request, failure)
            self.leases.end(request, Failed(request.request_id, lease.fence, failure))
            return
        timing = Timing(queue_s=lease.queued_s, upscale_s=self._clock() - began_s)
        result = ImageResult(
            request.request_id, data, request.output.image_format, timing, num_bytes
        )
        self._log.finished(request, timing)
        self.leases.end(request, Finished(request.request_id, lease.fence, result))

    async def _enlarged(self, request: ImageRequest, source: str) -> bytes:
        if request.upscale is None:
            raise RequestFailed("a lease on an image to enlarge does not say how much", "upscale")
        png = await self._results.get(request, source)
        try:
            coding = self._coder.enlarge(
                png, request.upscale.factor, request.output, request.recipe(), fair_client(request)
            )
            return await asyncio.wrap_future(coding)
        except RequestFailed as error:
            raise RequestFailed(error.message, "upscale") from error
        except MODEL_ERRORS as error:
            raise RequestFailed(f"{type(error).__name__}: {error}", "upscale") from error
