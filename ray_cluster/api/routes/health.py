"""``/healthz``: the process lives. ``/readyz``: a call would be served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import ApiError, not_deployed, unavailable
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.errors import DispatcherUnavailable, JobStoreUnavailable
from ray_cluster.process.turns import Shared
from ray_cluster.protocol.dispatcher import DispatcherClient

# a dispatcher that is slower than this answers too late for any caller of /readyz
ANSWER_TIMEOUT_S = 2.0
# folders of absolute paths, also of those in URLs
_FOLDERS = re.compile(
    r"((?<=sqlite:///)|(?<=file://)|(?<![\w:/.]))/([^/\s'\",;:()]+/)*(?=[^/\s'\",;:()])"
)


class HealthEndpoint:
    """Answers probes; needs no API key.

    Args:
        warnings: returns what is wrong here though calls are served; the dispatcher says the same
            of itself.
    """

    def __init__(
        self,
        client: DispatcherClient,
        catalog: Catalog,
        settings: CurrentSettings,
        warnings: Callable[[], Sequence[str]],
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._settings = settings
        self._warnings = warnings
        # anybody may ask, as often as they like
        self._state = Shared(self._look)

    async def live(self) -> dict[str, str]:
        """Say that this process answers."""
        return {"status": "ok"}

    async def ready(self) -> dict[str, object]:
        """Say that the settings are here, the dispatcher answers and the models are registered.

        A model that was added while this gateway ran, or that is not deployed beside one that is,
        is only a warning.
        """
        return await self._state.get()

    async def _look(self) -> dict[str, object]:
        if not self._settings.pool_by_model:
            raise self._not_ready("this gateway does not know its settings yet")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                profiles = await self._catalog.refresh()
                starting = await self._client.starting()
                undeployed = await self._client.undeployed()
                warnings = [*self._warnings(), *await self._client.warnings()]
        except TimeoutError:
            raise self._not_ready(
                f"the dispatcher has not answered within {ANSWER_TIMEOUT_S:g} s"
            ) from None
        except DispatcherUnavailable:
            raise self._not_ready("the dispatcher does not answer") from None
        except JobStoreUnavailable as error:
            raise self._not_ready(str(error)) from None
        models = self._settings.pool_by_model
        missing = [name for name in models if name not in profiles or name in starting]
        absent = [name for name in missing if name in undeployed]
        loading = [name for name in missing if name not in undeployed]
        reasons = [f"no replica of {', '.join(loading)} has registered yet"] if loading else []
        needed = set(self._settings.needed_models)
        # what nobody deployed keeps no other model from being served
        if needed & set(loading) or (needed & set(absent) and len(missing) == len(models)):
            raise self._not_ready(
                "; ".join([*reasons, not_deployed(absent)] if absent else reasons)
            )
        # the dispatcher's warnings name pools that are not deployed
        warnings += reasons
        shown = [_without_folders(one) for one in warnings]
        return {"status": "ready", "models": list(profiles), "warnings": shown}

    def _not_ready(self, reason: str) -> ApiError:
        also = [f"Also: {_without_folders(one)}." for one in self._warnings()]
        return unavailable(" ".join([f"Not ready: {reason}.", *also]), "not_ready")


def _without_folders(warning: str) -> str:
    """Return a warning for everybody: of this machine's paths, only the last part."""
    return _FOLDERS.sub("", warning)
