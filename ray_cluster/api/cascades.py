"""Calls that name a cascade: which of its models make the images, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.prompts import PromptCheck
from ray_cluster.api.resolve import resolve
from ray_cluster.api.schema import ImageGenerationRequest
from ray_cluster.config.sections import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.cascade import entry_for_quality
from ray_cluster.policies.types import CascadeEntry, EntryReason
from ray_cluster.protocol.settings import CascadeModel
from ray_cluster.requests import CascadeUse, ImageRequest, LightStage

# what a call says of sampling is meant for the heavy model
_OF_THE_HEAVY = (
    *("num_inference_steps", "guidance_scale", "sampler"),
    *("fidelity", "allow", "min_inference_steps"),
)
# parameters that the light model may not take -> why such a call goes to the heavy one
_UNSUPPORTED: dict[str, EntryReason] = {"size": "size", "negative_prompt": "negative_prompt"}


class CascadeResolver:
    """Makes requests of calls that name a cascade."""

    def __init__(self, catalog: Catalog, prompts: PromptCheck) -> None:
        self._catalog = catalog
        self._prompts = prompts

    async def resolve(
        self,
        fields: ImageGenerationRequest,
        cascade: CascadeModel,
        limits: LimitsConfig,
        *,
        is_stored: bool,
    ) -> tuple[ImageRequest, ...]:
        """Return one request per image; its prompts are checked.

        Raises:
            ApiError: 503, one of the models has no replica yet.
            InvalidRequest: a value is out of bounds of the model that makes the image: of the heavy
                one, where either may.
        """
        alone = entry_for_quality(fields.quality)
        if alone == "light":
            requests = await self._of(cascade.light, fields, limits, is_stored=is_stored)
            return _alone(requests, cascade.name, "light", "quality")
        requests = await self._of(cascade.heavy, fields, limits, is_stored=is_stored)
        if alone == "heavy":
            return _alone(requests, cascade.name, "heavy", "quality")
        first = requests[0]
        # the size is the heavy model's where the call leaves it open
        changes = {"size": f"{first.width_px}x{first.height_px}", "n": 1, "seed": first.seed}
        light_fields = fields.model_copy(update={**dict.fromkeys(_OF_THE_HEAVY), **changes})
        try:
            [light] = await self._of(cascade.light, light_fields, limits, is_stored=is_stored)
        except InvalidRequest as error:
            reason = _UNSUPPORTED.get(error.param or "", "prompt")
            return _alone(requests, cascade.name, "heavy", reason)
        stage = LightStage(
            model=light.model,
            discriminator=cascade.discriminator,
            num_steps=light.num_steps,
            guidance_scale=light.guidance_scale,
            sampler=light.sampler,
            embeds_guidance=light.embeds_guidance,
        )
        use = CascadeUse(cascade.name, stage)
        return tuple(replace(one, cascade=use) for one in requests)

    async def _of(
        self, model: str, fields: ImageGenerationRequest, limits: LimitsConfig, *, is_stored: bool
    ) -> tuple[ImageRequest, ...]:
        profile = await self._catalog.profile(model)
        requests = resolve(fields, profile, limits, is_stored=is_stored)
        await self._prompts.check(fields, profile)
        return requests


def _alone(
    requests: Sequence[ImageRequest], name: str, entry: CascadeEntry, reason: EntryReason
) -> tuple[ImageRequest, ...]:
    use = CascadeUse(name, None, entry, reason)
    return tuple(replace(one, cascade=use) for one in requests)
