"""From what a call wants to its image requests: which model or models make them, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from ray_cluster.api.access.auth import caller_of, check_priority, owner_of
from ray_cluster.api.access.middleware import request_id_of
from ray_cluster.api.advice import wrong
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.input.schemas import ImageEditRequest, ImageGenerationRequest
from ray_cluster.api.input.sent_images import CheckedImages
from ray_cluster.api.resolve.controlnets import ControlNets, SentControlNet
from ray_cluster.api.resolve.edits import resolve_edit
from ray_cluster.api.resolve.fidelity import check_unmeasured
from ray_cluster.api.resolve.generation import resolve
from ray_cluster.api.resolve.last_stages import with_last_stages
from ray_cluster.api.resolve.loras import BasedLora, LoraResolver, beside_loras, with_loras
from ray_cluster.api.resolve.prompts import PromptCheck
from ray_cluster.api.resolve.references import check_number
from ray_cluster.config.loading import Document
from ray_cluster.config.sections.cascades import CascadeConfig
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.cascade import cascade_entry, entry_for_quality
from ray_cluster.policies.types import CascadeEntry, EntryReason
from ray_cluster.requests import CascadeUse, ImageRequest, LightStage, ModelProfile

# of all images in one reply: four bytes of base64 each, and Ray's messages end at 256 MiB
MAX_INLINE_PIXELS = 48_000_000
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
    "image": "edit",
    "model": "edit",
    "strength": "edit",
}


@dataclass(frozen=True, slots=True)
class WantedImages:
    """What a call asks for, before it is known which model makes it.

    Attributes:
        images: of an edit; None for images from text.
        is_stored: whether what is made goes to the result store.
        loras: those that it names.
        controlnets: those that it names; their maps come once it is known what makes it.
    """

    fields: ImageGenerationRequest
    images: CheckedImages | None
    is_stored: bool
    loras: tuple[BasedLora, ...] = ()
    controlnets: tuple[SentControlNet, ...] = ()

    def of(self, profile: ModelProfile, limits: LimitsConfig) -> tuple[ImageRequest, ...]:
        """Return one request per image, of a model.

        Raises:
            InvalidRequest: see ``resolve`` and :func:`.resolve_edit`; or a LoRA or a ControlNet is
                made for another model.
        """
        for one in self.controlnets:
            one.check_model(profile)
        if self.loras and profile.engine == "diffusers":
            what = f"cannot be added to {profile.model}, which is run call by call"
            raise wrong("loras", what, "other model")
        if self.controlnets:
            check_unmeasured(self.fields, "without ControlNets", "an image with them")
            profile = replace(profile, fewer_steps=None)
        profile = beside_loras(self.fields, self.loras, profile)
        return with_loras(self.fields, self.loras, profile, self._without_loras(profile, limits))

    def _without_loras(
        self, profile: ModelProfile, limits: LimitsConfig
    ) -> tuple[ImageRequest, ...]:
        if self.images is not None:
            assert isinstance(self.fields, ImageEditRequest), "only edits have images"
            return resolve_edit(self.fields, self.images, profile, limits, is_stored=self.is_stored)
        if profile.edits == "masked":
            what = f"is {profile.model}, an inpainting model: it makes nothing from text alone"
            raise wrong("model", what, "text alone")
        if profile.min_references:
            what = f"is {profile.model}, which changes pictures: it makes nothing from text alone"
            raise wrong("model", what, "pictures")
        return resolve(self.fields, profile, limits, is_stored=self.is_stored)


class RequestResolver:
    """Makes the image requests of calls: of one model, or of the two of a cascade."""

    def __init__(
        self,
        catalog: Catalog,
        prompts: PromptCheck,
        loras: LoraResolver,
        controlnets: ControlNets,
    ) -> None:
        self._catalog = catalog
        self._prompts = prompts
        self._loras = loras
        self._controlnets = controlnets

    async def check_number(
        self, fields: ImageGenerationRequest, num_images: int, param: str, document: Document
    ) -> None:
        """Refuse more images than the model of a call takes, before any is decoded.

        Raises:
            ApiError: see :meth:`resolve`.
            InvalidRequest: it names the models that take so many.
        """
        if num_images == 1:
            return
        fields, _ = await self._loras.resolve(fields)
        cascade = next((one for one in document.cascades if one.name == fields.model), None)
        name = fields.model or document.pools[0].model_name
        if cascade is not None:
            is_light = entry_for_quality(fields.quality) == "light"
            name = cascade.light if is_light else cascade.heavy
        profile, profiles = await self._catalog.profile(name), await self._catalog.refresh()
        check_number(num_images, param, profile, profiles)

    async def resolve(
        self, request: Request, wanted: WantedImages, document: Document, *, is_inline: bool
    ) -> tuple[ImageRequest, ...]:
        """Return one request per image; LoRAs are found, prompts checked and maps made.

        Args:
            wanted: without LoRAs.
            document: the settings that the call is read with.
            is_inline: whether the reply holds the images.

        Raises:
            ApiError: there is no such model, or it has no replica yet; or the key may not do this.
            InvalidRequest: a value is out of the model's bounds, or the reply would be too large.
        """
        check_priority(request, wanted.fields.priority)
        fields, loras = await self._loras.resolve(wanted.fields)
        wanted = replace(wanted, fields=fields, loras=loras)
        name, limits = fields.model, document.limits
        cascade = next((one for one in document.cascades if one.name == name), None)
        if cascade is not None:
            requests = await self._of_cascade(wanted, cascade, limits)
        else:
            model = document.pools[0].model_name if name is None else name
            if fields.require is not None:
                what = f"changes nothing: {model} is no cascade"
                raise wrong("require", what, more="Leave it out, or name a cascade as 'model'.")
            requests = await self._of(model, wanted, limits)
        requests = with_last_stages(requests, fields, document)
        if is_inline:
            _check_inline(requests)
        requests = await self._controlnets.with_maps(request, requests, wanted.controlnets, limits)
        call_id = request_id_of(request)
        owner, caller = owner_of(request), caller_of(request)
        return tuple(replace(one, call_id=call_id, owner=owner, caller=caller) for one in requests)

    async def _of(
        self, model: str, wanted: WantedImages, limits: LimitsConfig
    ) -> tuple[ImageRequest, ...]:
        profile = await self._catalog.profile(model)
        requests = wanted.of(profile, limits)
        await self._prompts.check(wanted.fields, profile)
        return requests

    async def _of_cascade(
        self, wanted: WantedImages, cascade: CascadeConfig, limits: LimitsConfig
    ) -> tuple[ImageRequest, ...]:
        """Return one request per image; errors are of the heavy model, where either may make it."""
        alone = entry_for_quality(wanted.fields.quality)
        requires_heavy = wanted.fields.require == "heavy"
        if alone == "light" and requires_heavy:
            what = "is 'heavy', and 'quality' asks for the light model"
            raise wrong("require", what, more="Leave one of them out.")
        if alone == "light":
            requests = await self._of(cascade.light, wanted, limits)
            return _alone(requests, cascade.name, "light", "quality")
        requests = await self._of(cascade.heavy, wanted, limits)
        if alone == "heavy":
            return _alone(requests, cascade.name, "heavy", "quality")
        if wanted.loras or wanted.controlnets:
            # they are made for one model
            return _alone(requests, cascade.name, "heavy", "add_ons")
        first = requests[0]
        # the size is the heavy model's where the call leaves it open
        changes: dict[str, Any] = {"n": 1, "seed": first.seed}
        if wanted.images is None:
            changes["size"] = f"{first.width_px}x{first.height_px}"
        light_fields = wanted.fields.model_copy(update={**dict.fromkeys(_OF_THE_HEAVY), **changes})
        try:
            light_wanted = replace(wanted, fields=light_fields)
            [light] = await self._of(cascade.light, light_wanted, limits)
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
        use = CascadeUse(cascade.name, stage, requires_heavy=requires_heavy)
        return tuple(replace(one, cascade=use) for one in requests)


def _is_alike(light: ImageRequest, heavy: ImageRequest) -> bool:
    """Whether both models make an edit of the same pixels."""
    is_same = light.size_px == heavy.size_px and light.references == heavy.references
    if not is_same or light.edit is None or heavy.edit is None:
        return is_same and light.edit == heavy.edit
    return replace(light.edit, schedule_steps=heavy.edit.schedule_steps) == heavy.edit


def _alone(
    requests: Sequence[ImageRequest], name: str, entry: CascadeEntry, reason: EntryReason
) -> tuple[ImageRequest, ...]:
    use = CascadeUse(name, None, entry, reason)
    return tuple(replace(one, cascade=use) for one in requests)


def _check_inline(requests: Sequence[ImageRequest]) -> None:
    """Refuse images that would be made, and then not fit into the reply."""
    sizes = [one.output_px for one in requests]
    num_pixels = sum(width * height for width, height in sizes)
    if num_pixels > MAX_INLINE_PIXELS:
        size, most = "{}x{}".format(*sizes[0]), MAX_INLINE_PIXELS / 1e6
        what = f"is not 'url', and the reply would hold {len(sizes)} images of {size}"
        what = f"{what}, {num_pixels / 1e6:.0f} million pixels; it can hold {most:.0f} million"
        raise wrong("response_format", what, "inline", code="reply_too_large")
