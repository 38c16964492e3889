"""Calls that name a cascade: which of its models make the images, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.resolve.edits import WantedImages
from ray_cluster.api.resolve.prompts import PromptCheck
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.cascade import cascade_entry, entry_for_quality
from ray_cluster.policies.types import CascadeEntry, EntryReason
from ray_cluster.protocol.settings import CascadeModel
from ray_cluster.requests import CascadeUse, ImageRequest, LightStage

# what a call says of sampling is meant for the heavy model
_OF_THE_HEAVY = (
    *("num_inference_steps", "guidance_scale", "sampler"),
    *("fidelity", "allow", "min_inference_steps"),
)
# parameters that the light model may not take -> why such a call goes to the heavy one
_UNSUPPORTED: dict[str, EntryReason] = {
    "size": "size",
    "negative_prompt": "negative_prompt",
    "mask": "edit",
    "model": "edit",
    "strength": "edit",
}


class CascadeResolver:
    """Makes requests of calls that name a cascade."""

    def __init__(self, catalog: Catalog, prompts: PromptCheck) -> None:
        self._catalog = catalog
        self._prompts = prompts

    async def resolve(
        self, wanted: WantedImages, cascade: CascadeModel, limits: LimitsConfig
    ) -> tuple[ImageRequest, ...]:
        """Return one request per image; its prompts are checked.

        Raises:
            ApiError: 503, one of the models has no replica yet.
            InvalidRequest: a value is out of bounds of the model that makes the image: of the heavy
                one, where either may.
        """
        alone = entry_for_quality(wanted.fields.quality)
        if alone == "light":
            requests = await self._of(cascade.light, wanted, limits)
            return _alone(requests, cascade.name, "light", "quality")
        requests = await self._of(cascade.heavy, wanted, limits)
        if alone == "heavy":
            return _alone(requests, cascade.name, "heavy", "quality")
        if wanted.loras or wanted.controls:
            # they are made for one model
            return _alone(requests, cascade.name, "heavy", "add_ons")
        first = requests[0]
        # the size is the heavy model's where the call leaves it open
        changes: dict[str, Any] = {"n": 1, "seed": first.seed}
        if wanted.images is None:
            changes["size"] = f"{first.width_px}x{first.height_px}"
        light_fields = wanted.fields.model_copy(update={**dict.fromkeys(_OF_THE_HEAVY), **changes})
        try:
            [light] = await self._of(cascade.light, replace(wanted, fields=light_fields), limits)
        except InvalidRequest as error:
            reason = _UNSUPPORTED.get(error.param or "", "prompt")
            return _alone(requests, cascade.name, "heavy", reason)
        # both must make the same part of it, at the same size
        supported = {"mask"} if _is_alike(light, first) else set[str]()
        if cascade_entry((), supported, is_edit=wanted.images is not None) == "heavy":
            return _alone(requests, cascade.name, "heavy", "edit")
        stage = LightStage(
            model=light.model,
            discriminator=cascade.discriminator,
            num_steps=light.num_steps,
            guidance_scale=light.guidance_scale,
            sampler=light.sampler,
            embeds_guidance=light.embeds_guidance,
            schedule_steps=None if light.edit is None else light.schedule_steps,
        )
        use = CascadeUse(cascade.name, stage)
        return tuple(replace(one, cascade=use) for one in requests)

    async def _of(
        self, model: str, wanted: WantedImages, limits: LimitsConfig
    ) -> tuple[ImageRequest, ...]:
        profile = await self._catalog.profile(model)
        requests = wanted.of(profile, limits)
        await self._prompts.check(wanted.fields, profile)
        return requests


def _is_alike(light: ImageRequest, heavy: ImageRequest) -> bool:
    """Whether both models make an edit of the same pixels."""
    if light.size_px != heavy.size_px or light.edit is None or heavy.edit is None:
        return light.size_px == heavy.size_px and light.edit == heavy.edit
    return replace(light.edit, schedule_steps=heavy.edit.schedule_steps) == heavy.edit


def _alone(
    requests: Sequence[ImageRequest], name: str, entry: CascadeEntry, reason: EntryReason
) -> tuple[ImageRequest, ...]:
    use = CascadeUse(name, None, entry, reason)
    return tuple(replace(one, cascade=use) for one in requests)
