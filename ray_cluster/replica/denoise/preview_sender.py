"""Encodes a replica's previews and sends them to the dispatcher."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray_cluster.engine.stages.events import Previewed
from ray_cluster.errors import DispatcherUnavailable, InvalidRequest, RequestFailed
from ray_cluster.observability.logs import bound, fields_of, without_prompts
from ray_cluster.policies.steps.previews import preview_steps
from ray_cluster.process.tasks import Tasks
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Lease, Shown
from ray_cluster.protocol.outcomes import Preview
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.unexpected import failing_alone
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)

_MAX_PENDING = 4


class Previews:
    """Encodes and sends each preview once; failures and too many at a time are dropped.

    Args:
        lease_of: returns the present lease of a request, if it is still held.
    """

    def __init__(
        self,
        link: DispatcherLink,
        replica_id: str,
        delivery: Delivery,
        lease_of: Callable[[ImageRequest], Lease | None],
    ) -> None:
        self._link = link
        self._replica_id = replica_id
        self._delivery = delivery
        self._lease_of = lease_of
        self._tasks = Tasks()

    def send(self, event: Previewed) -> None:
        """Start to send a preview."""
        if len(self._tasks) < _MAX_PENDING:
            self._tasks.spawn(self._send(event))

    async def _send(self, event: Previewed) -> None:
        request = event.request
        try:
            with failing_alone(request, "coding"):
                await self._show(event)
        except (RequestFailed, InvalidRequest) as error:
            with bound(**fields_of(request)):
                logger.warning("no preview: %s", without_prompts(str(error), request))

    async def _show(self, event: Previewed) -> None:
        request = event.request
        steps = preview_steps(request.num_steps, request.output.num_previews)
        index = steps.index(event.steps_done)
        data = await self._delivery.preview(event, index)
        if (lease := self._lease_of(request)) is None:
            return
        preview = Preview(index, event.steps_done, request.num_steps, data)
        try:
            await self._link.show(self._replica_id, Shown(request.request_id, lease.fence, preview))
        except DispatcherUnavailable as error:
            raise RequestFailed(str(error), "coding") from error

    async def stop(self) -> None:
        """Drop what is not sent yet."""
        await self._tasks.close()
