"""``/healthz``: the process lives. ``/readyz``: a call would be served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import DEFAULT_RETRY_AFTER_S, ApiError
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.dispatcher import DispatcherClient

# a dispatcher that is slower than this answers too late for any caller of /readyz
ANSWER_TIMEOUT_S = 2.0


class HealthEndpoint:
    """Answers probes; needs no API key.

    Args:
        warnings: returns what is wrong here though calls are served; the dispatcher says the same
            of itself.
    """

    def __init__(
        self, client: DispatcherClient, catalog: Catalog, warnings: Callable[[], Sequence[str]]
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._warnings = warnings

    async def live(self) -> dict[str, str]:
        """Tell that this process answers."""
        return {"status": "ok"}

    async def ready(self) -> dict[str, object]:
        """Tell that the settings are here, the dispatcher answers and the models are registered.

        A model that was added while this gateway ran is waited for by its own calls alone.
        """
        if not self._catalog.configured:
            raise self._not_ready("this gateway does not know its settings yet")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                profiles = await self._catalog.refresh()
                starting = await self._client.starting()
                warnings = [*self._warnings(), *await self._client.warnings()]
        except TimeoutError:
            raise self._not_ready(
                f"the dispatcher has not answered within {ANSWER_TIMEOUT_S:g} s"
            ) from None
        except DispatcherUnavailable:
            raise self._not_ready("the dispatcher does not answer") from None
        configured = self._catalog.configured
        missing = [name for name in configured if name not in profiles or name in starting]
        text = f"no replica of {', '.join(missing)} has registered yet"
        if set(missing) & set(self._catalog.needed):
            raise self._not_ready(text)
        if missing:
            warnings.append(text)
        return {"status": "ready", "models": list(profiles), "warnings": warnings}

    def _not_ready(self, reason: str) -> ApiError:
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            " ".join([f"Not ready: {reason}.", *(f"Also: {one}." for one in self._warnings())]),
            code="not_ready",
            retry_after_s=DEFAULT_RETRY_AFTER_S,
        )
