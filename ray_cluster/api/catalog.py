"""The models that calls may name: those in the settings, and those that replicas registered."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace

from ray_cluster.api.errors import model_not_found, model_not_ready
from ray_cluster.api.output.resource_schemas import UpscaleCard
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.sections.cascades import CascadeConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.requests import UPSCALE_FACTORS, ModelProfile, size_of

logger = logging.getLogger(__name__)

# age of the profiles at which a call has them read again
_MAX_AGE_S = 1.0


class Catalog:
    """Profiles of the registered models, cached for a short while to spare the dispatcher a call.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(
        self, client: DispatcherClient, settings: CurrentSettings, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._profile_by_model: dict[str, ModelProfile] = {}
        self._read_at_s = -math.inf
        self._reading: asyncio.Task[None] | None = None

    @property
    def known(self) -> list[str]:
        """Names of the models that are configured, or registered and not removed since, and of the
        cascades."""
        cascades = (one.name for one in self._settings.latest.cascades)
        return list(dict.fromkeys([*self._settings.pool_by_model, *self._offered, *cascades]))

    @property
    def cascades(self) -> tuple[CascadeConfig, ...]:
        """The cascades that calls may name."""
        return self._settings.latest.cascades

    @property
    def controlnets(self) -> tuple[ControlNetConfig, ...]:
        """The ControlNets that calls may name."""
        return self._settings.latest.controlnets

    @property
    def upscale(self) -> UpscaleCard | None:
        """How finished images of any model may be enlarged, if they may."""
        one = next(iter(self._settings.latest.upscalers), None)
        return (
            None if one is None else UpscaleCard(factors=list(UPSCALE_FACTORS), max_px=one.max_px)
        )

    @property
    def _offered(self) -> dict[str, ModelProfile]:
        # the dispatcher leaves removed models out as well, from its next answer on
        removed = self._settings.removed_models
        found = self._profile_by_model.items()
        return {name: profile for name, profile in found if name not in removed}

    async def refresh(self) -> dict[str, ModelProfile]:
        """Return the profiles that are registered now; callers at the same time share one read."""
        await asyncio.shield(self._start_reading())
        return {name: self._with_defaults(one) for name, one in self._offered.items()}

    def _start_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            # in a context of its own: Serve cancels what a cancelled request has called, by context
            self._reading = asyncio.create_task(self._read(), context=Context())
            self._reading.add_done_callback(_log_failure)
        return self._reading

    async def _read(self) -> None:
        self._profile_by_model = dict(await self._client.models())
        self._read_at_s = self._clock()

    async def profile(self, name: str) -> ModelProfile:
        """Return the profile of a model.

        Raises:
            ApiError: 404 for an unknown model, 503 for one that has not registered yet.
        """
        if name not in self._profile_by_model:
            await self.refresh()
        elif self._is_old:
            # no call waits for this: what a model is changes next to never, and whether it can be
            # served now is the dispatcher's to say
            self._start_reading()
        if (found := self._offered.get(name)) is not None:
            return self._with_defaults(found)
        if name in self._settings.pool_by_model:
            is_deployed = name not in await self._client.undeployed()
            raise model_not_ready(name, is_deployed=is_deployed)
        raise model_not_found(name, self.known)

    def _with_defaults(self, profile: ModelProfile) -> ModelProfile:
        """Return a model's profile with the defaults of the settings."""
        pool = self._settings.pool_by_model.get(profile.model)
        if pool is None:
            return profile
        defaults = pool.defaults
        width_px, height_px = profile.default_width_px, profile.default_height_px
        if defaults.size is not None:
            width_px, height_px = size_of(defaults.size)
        guidance_scale = defaults.guidance_scale
        pools = self._settings.latest.pools
        # a group reuses nothing of a step, and whichever replica is free gets a request
        has_group = any(one.is_group for one in pools if one.model_name == profile.model)
        return replace(
            profile,
            default_width_px=width_px,
            default_height_px=height_px,
            default_num_steps=defaults.num_inference_steps or profile.default_num_steps,
            default_guidance_scale=(
                profile.default_guidance_scale if guidance_scale is None else guidance_scale
            ),
            default_sampler=defaults.sampler or profile.default_sampler,
            fewer_steps=pool.fidelity.table() if pool.fidelity else profile.fewer_steps,
            outer_blocks=None if has_group else profile.outer_blocks,
            lora_start=pool.lora_start.start() if pool.lora_start else None,
        )

    @property
    def _is_old(self) -> bool:
        # a wall clock may be set back: then the profiles are from the future, and old
        return not 0 <= self._clock() - self._read_at_s < _MAX_AGE_S


def _log_failure(reading: asyncio.Task[None]) -> None:
    """Fetch the error of a read that perhaps nobody waits for any more."""
    if not reading.cancelled() and (error := reading.exception()) is not None:
        logger.warning("the models could not be asked for: %s", error)
