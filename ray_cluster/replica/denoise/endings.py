"""How a replica ends its leases: images are coded, and each end is reported once."""

from __future__ import annotations

import asyncio

from ray_cluster.engine.stages.events import Broken, Decoded, Previewed
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.small_images import small_image
from ray_cluster.process.tasks import Tasks
from ray_cluster.protocol.leases import Failed, Finished, Lease, Returned
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.preview_sender import Previews
from ray_cluster.replica.held_leases import HeldLeases
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.replica.unexpected import failing_alone, failure_of
from ray_cluster.requests import candidate_name


class Endings:
    """Takes what the runner says of held leases to their ends.

    Args:
        states: of unfinished requests, forgotten once they are of no use.

    Attributes:
        leases: that the replica holds; the ends are reported from there.
        tasks: the images that are coded now.
    """

    def __init__(
        self,
        leases: HeldLeases,
        delivery: Delivery,
        states: StateTransfer,
        previews: Previews,
        log: ReplicaLog,
    ) -> None:
        self.leases = leases
        self._delivery = delivery
        self._states = states
        self._previews = previews
        self._log = log
        self.tasks = Tasks()

    def settle(self, event: Decoded | Previewed | Broken) -> None:
        """Go on with what has become of a request, if its lease is still held."""
        if (lease := self.leases.lease_of(event.request)) is None:
            return
        if isinstance(event, Previewed):
            self._previews.send(event)
        elif isinstance(event, Broken):
            self.fail(lease, event.error)
        else:
            self.tasks.spawn(self._code(lease, event))

    async def _code(self, lease: Lease, event: Decoded) -> None:
        request = event.request
        small = None
        try:
            with failing_alone(request, "coding"):
                name = candidate_name(request.request_id, lease.stage)
                result = await self._delivery.deliver(event, name if lease.is_candidate else "")
                if lease.is_candidate and request.cascade is not None:
                    small = await asyncio.to_thread(small_image, event.pixels)
        except (RequestFailed, InvalidRequest) as error:
            self.fail(lease, error)
            return
        self._log.finished(request, result.timing)
        self.leases.end(request, Finished(request.request_id, lease.fence, result, small))

    def fail(self, lease: Lease, error: RequestFailed | InvalidRequest) -> None:
        """Report that an image cannot be made."""
        failure = failure_of(lease.request.request_id, error)
        self._log.failed(lease.request, failure)
        self.leases.end(lease.request, Failed(failure.request_id, lease.fence, failure))

    def give_back(self, lease: Lease, steps_done: int) -> None:
        """Report that a lease is returned, with the steps of its state in the store."""
        request_id = lease.request.request_id
        self.leases.end(lease.request, Returned(request_id, lease.fence, steps_done))
        self._states.forget(request_id, is_ended=False)
        self._log.returned(lease.request, steps_done)
