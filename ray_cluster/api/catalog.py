"""What models there are: those in the settings, and those that a replica has registered."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextvars import Context

from ray_cluster.api.errors import model_not_found, model_not_ready
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.pools import DefaultsConfig
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.requests import ModelProfile

logger = logging.getLogger(__name__)


class Catalog:
    """Profiles of the registered models, kept for a short while to spare the dispatcher a call.

    Args:
        clock: seconds; only differences count.
        max_age_s: age at which a call has the profiles asked for again.
    """

    def __init__(
        self,
        client: DispatcherClient,
        settings: CurrentSettings,
        clock: Callable[[], float],
        max_age_s: float = 1.0,
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._max_age_s = max_age_s
        self._profile_by_model: dict[str, ModelProfile] = {}
        self._read_at_s = -math.inf
        self._reading: asyncio.Task[None] | None = None

    @property
    def configured(self) -> list[str]:
        """Names of the configured models; the first is the default."""
        return self._settings.models

    @property
    def needed(self) -> list[str]:
        """Those of them without which this gateway is not ready."""
        return self._settings.needed_models

    @property
    def known(self) -> list[str]:
        """Names of the models that are configured or were registered when last asked."""
        return list(dict.fromkeys([*self._settings.models, *self._profile_by_model]))

    def defaults(self, model: str) -> DefaultsConfig:
        """Return the configured defaults of a model; none for one that is not configured."""
        return self._settings.defaults(model)

    async def refresh(self) -> dict[str, ModelProfile]:
        """Return the profiles that are registered now; callers at the same time share one read."""
        await asyncio.shield(self._start_reading())
        found = self._profile_by_model.items()
        return {name: self._settings.applied_to(profile) for name, profile in found}

    def _start_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            # in a context of its own: Serve cancels what a cancelled request has called, by context
            self._reading = asyncio.create_task(self._read(), context=Context())
            self._reading.add_done_callback(_note_failure)
        return self._reading

    async def _read(self) -> None:
        self._profile_by_model = dict(await self._client.models())
        self._read_at_s = self._clock()

    async def profile(self, model: str | None) -> ModelProfile:
        """Return the profile of a model, or of the first configured one.

        Raises:
            ApiError: 404 for an unknown model, 503 for one that has not registered yet.
        """
        name = self._settings.get().models[0].name if model is None else model
        if name not in self._profile_by_model:
            await self.refresh()
        elif self._is_old:
            # no call waits for this: what a model is changes next to never, and whether it can be
            # served now is the dispatcher's to say
            self._start_reading()
        if name in self._profile_by_model:
            return self._settings.applied_to(self._profile_by_model[name])
        if name in self.configured:
            raise model_not_ready(name)
        raise model_not_found(name, self.known)

    @property
    def _is_old(self) -> bool:
        # a wall clock may be set back: then what is kept is from the future, and old
        return not 0 <= self._clock() - self._read_at_s < self._max_age_s


def _note_failure(reading: asyncio.Task[None]) -> None:
    """Look at the error of a read that perhaps nobody waits for any more."""
    if not reading.cancelled() and (error := reading.exception()) is not None:
        logger.warning("the models could not be asked for: %s", error)
