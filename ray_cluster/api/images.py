"""``POST /v1/images/generations``: validate, have it made, reply. Nothing is queued here."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.body import read_object
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.client import DispatcherClient
from ray_cluster.api.group import GroupRunner, while_connected
from ray_cluster.api.reply import write_reply
from ray_cluster.api.resolve import resolve
from ray_cluster.api.validate import validate
from ray_cluster.config import ClusterConfig


class ImagesEndpoint:
    """Turns one call into image requests, and their outcomes into one reply."""

    def __init__(
        self,
        client: DispatcherClient,
        catalog: Catalog,
        config: ClusterConfig,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._limits = config.limits
        self._clock = clock
        # three waits in the time after which the dispatcher takes a client for gone
        self._runner = GroupRunner(client, config.dispatch.attached_timeout_s / 3)

    async def generate(self, request: Request) -> Response:
        """Make images from a text.

        OpenAI's fields and extensions, which are marked so. A field that this service has no
        counterpart for, or that would change nothing, is refused by name.
        """
        body = await read_object(request, self._limits.max_body_bytes)
        fields = validate(body)
        profile = await self._catalog.profile(fields.model)
        defaults = self._catalog.defaults(profile.model)
        requests = resolve(fields, profile, defaults, self._limits)
        completed = await while_connected(request, self._runner.run(requests, self._catalog.known))
        content = await write_reply(requests, completed, int(self._clock()))
        return Response(content, media_type="application/json")
