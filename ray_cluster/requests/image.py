"""The request for one image, and the names of what is stored of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_cluster.errors import LastStage
from ray_cluster.policies.edits import steps_of_schedule
from ray_cluster.policies.fidelity import Fidelity, ReusedSteps, Terms
from ray_cluster.policies.types import RequestView, WhenLate
from ray_cluster.requests.parts import (
    FLOW_SAMPLER_NAMES,
    AddOns,
    BlobRef,
    CascadeUse,
    ControlNetUse,
    Edit,
    ImageFormat,
    LightStage,
    OutputSpec,
    Reference,
    SamplerName,
    UpscaleUse,
)

_NO_ADD_ONS = AddOns()
_PNG = OutputSpec()


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One image to make; the same values always give the same image.

    Attributes:
        request_id: unique in the cell.
        model: name under which a pool serves the model; in a cascade the heavy one's, where both
            may make the image.
        width_px: width of the image that the model makes; a multiple of the model's
            ``size_multiple_px``.
        height_px: its height, likewise.
        num_steps: denoising steps that it takes.
        guidance_scale: classifier-free guidance weight; guidance is off at 1 or below.
        seed: seeds the request's own noise generator, in [0, 2**63).
        negative_prompt: what guidance leads away from; None is no text, which some models take for
            something else than an empty one.
        priority: higher is served first.
        slo_s: seconds from arrival to the deadline; None takes the service's default.
        when_late: whether it is to be made even if it would miss its deadline.
        add_ons: ControlNets and LoRAs.
        edit: what it changes; None for text to image.
        references: pictures that the model looks at, in their order.
        terms: requested and least fidelity; None for an exact image with all steps.
        embeds_guidance: whether the guidance scale is an input of the model, without second rows.
        cascade: None for a request that names a single model.
        upscale: None for an image as the model makes it.
        call_id: ``X-Request-ID`` of the HTTP call.
        job_id: the durable job that it belongs to; empty for an attached one.
        owner: whose inputs it may read; see :class:`ray_cluster.storage.inputs.InputStore`.
        caller: whose share it takes: of an open service's one owner, an address; empty in jobs of
            before there were shares.
    """

    request_id: str
    model: str
    prompt: str
    width_px: int
    height_px: int
    num_steps: int
    guidance_scale: float
    sampler: SamplerName
    seed: int
    negative_prompt: str | None = None
    priority: int = 0
    slo_s: float | None = None
    when_late: WhenLate = "accept"
    add_ons: AddOns = _NO_ADD_ONS
    edit: Edit | None = None
    references: tuple[Reference, ...] = ()
    terms: Terms | None = None
    output: OutputSpec = _PNG
    embeds_guidance: bool = False
    cascade: CascadeUse | None = None
    upscale: UpscaleUse | None = None
    call_id: str = field(default="", compare=False)
    job_id: str = field(default="", compare=False)
    owner: str = field(default="", compare=False)
    caller: str = field(default="", compare=False)

    @property
    def sharer(self) -> str:
        """Whose share it takes."""
        return self.caller or self.owner

    @property
    def called_model(self) -> str:
        """What the call names: the model, or the cascade."""
        return self.model if self.cascade is None else self.cascade.name

    @property
    def is_routed(self) -> bool:
        """Whether a cascade's light model makes it first, and perhaps the heavy one anew."""
        return self.cascade is not None and self.cascade.light is not None

    @property
    def models(self) -> set[str]:
        """The models that may make it."""
        light = None if self.cascade is None else self.cascade.light
        return {self.model} if light is None else {self.model, light.model}

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return (self.width_px, self.height_px)

    @property
    def canvas_px(self) -> tuple[int, int]:
        """Width and height of the image, before it is enlarged."""
        return self.size_px if self.edit is None else self.edit.canvas_px

    @property
    def output_px(self) -> tuple[int, int]:
        """Width and height of the image that is returned."""
        factor = 1 if self.upscale is None else self.upscale.factor
        width_px, height_px = self.canvas_px
        return factor * width_px, factor * height_px

    @property
    def last_stages(self) -> Mapping[LastStage, str]:
        """What is done with the finished image, in that order, and the names of who does it."""
        uses: dict[LastStage, UpscaleUse | None] = {"upscale": self.upscale}
        return {kind: use.name for kind, use in uses.items() if use is not None}

    @property
    def leaves_files(self) -> bool:
        """Whether images of stages before the last go to the result store."""
        return self.output.is_stored or bool(self.last_stages)

    @property
    def schedule_steps(self) -> int:
        """Steps of the whole schedule, ``num_inference_steps`` of the API; its own are the last."""
        return self.num_steps if self.edit is None else self.edit.schedule_steps

    @property
    def first_step(self) -> int:
        """Index in the schedule of the step that it begins with."""
        return self.schedule_steps - self.num_steps

    @property
    def uses_guidance(self) -> bool:
        """Whether a second, unconditional row is computed per step (as diffusers decides it)."""
        return self.guidance_scale > 1.0 and not self.embeds_guidance

    @property
    def light(self) -> ImageRequest | None:
        """The image as the light model of its cascade makes it first; None without that stage.

        It has no previews, as it is one itself, and no terms: they are of the heavy model.
        """
        stage = None if self.cascade is None else self.cascade.light
        if stage is None or self.cascade is None:
            return None
        return replace(
            self,
            model=stage.model,
            num_steps=stage.num_steps,
            guidance_scale=stage.guidance_scale,
            sampler=stage.sampler,
            embeds_guidance=stage.embeds_guidance,
            edit=self._light_edit(stage),
            terms=None,
            output=replace(self.output, num_previews=0),
            cascade=replace(self.cascade, light=None),
        )

    def _light_edit(self, stage: LightStage) -> Edit | None:
        if self.edit is None:
            return None
        assert stage.schedule_steps is not None, "the light stage of an edit has a schedule"
        return replace(self.edit, schedule_steps=stage.schedule_steps)

    @property
    def fidelity(self) -> Fidelity | None:
        """The best mode that its present steps satisfy; None if that is not known."""
        return "exact" if self.terms is None else self.terms.fidelity(self.num_steps)

    @property
    def reuse(self) -> ReusedSteps | None:
        """Its steps, if some of them reuse activations."""
        return None if self.terms is None else self.terms.reuse

    @property
    def fewest_steps(self) -> int | None:
        """Fewest steps that it may be made with to be in time; None if it needs all it has."""
        fewest = None if self.terms is None else self.terms.fewest_steps
        return fewest if fewest is not None and fewest < self.num_steps else None

    @property
    def inputs(self) -> tuple[BlobRef, ...]:
        """All images that it is made from."""
        controls = (use.image for use in self.add_ons.controls)
        edit = () if self.edit is None else (self.edit.image, self.edit.mask)
        looked_at = (one.image for one in self.references)
        return (*controls, *(one for one in edit if one is not None), *looked_at)

    @property
    def file_id(self) -> str:
        """Name of its image in the result store; as hard to guess as the request's id."""
        return file_name(self.request_id, self.output.image_format)

    def preview_file_id(self, index: int) -> str:
        """Name of its preview of that index in the result store."""
        return f"{self.request_id}-{index}.{self.output.image_format}"

    @property
    def file_ids(self) -> tuple[str, ...]:
        """All names that it may have in the result store."""
        previews = (self.preview_file_id(index) for index in range(self.output.num_previews))
        return (self.file_id, *previews)

    def view(self, *, arrival_s: float, deadline_s: float, steps_done: int = 0) -> RequestView:
        """Return what a policy may know of this request, on the caller's clock."""
        return RequestView(
            request_id=self.request_id,
            model=self.model,
            width_px=self.width_px,
            height_px=self.height_px,
            num_steps=self.num_steps,
            uses_guidance=self.uses_guidance,
            priority=self.priority,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            steps_done=steps_done,
            num_previews=self.output.num_previews,
            when_late=self.when_late,
            fewest_steps=self.fewest_steps,
            loras=tuple(use.lora_id or use.name for use in self.add_ons.loras),
            lora_set=self.add_ons.lora_set,
            controls=tuple(use.name for use in self.add_ons.controls),
            # no replica keeps activations of a template yet: none is worth waiting for
            num_inputs=0 if self.edit is None else 1,
            mask_ratio=1.0 if self.edit is None else self.edit.mask_ratio,
            reference_px=sum(one.width_px * one.height_px for one in self.references),
            step_share=1.0 if self.reuse is None else self.reuse.cost_share,
        )

    def recipe(self) -> dict[str, str]:
        """Return everything needed to make the image again, as text chunks of a png."""
        recipe = {
            "model": self.model,
            "prompt": self.prompt,
            "size": "{}x{}".format(*self.canvas_px),
            "num_inference_steps": str(self.schedule_steps),
            "guidance_scale": repr(self.guidance_scale),
            "sampler": self.sampler,
            "seed": str(self.seed),
        }
        if self.negative_prompt is not None:
            recipe["negative_prompt"] = self.negative_prompt
        if self.reuse is not None:
            recipe["reuse"] = str(self.reuse.schedule)
        if self.cascade is not None:
            recipe["cascade"] = self.cascade.name
        if self.upscale is not None:
            recipe["upscale"] = str(self.upscale.factor)
        if self.add_ons.loras:
            loras = [{"name": one.name, "scale": one.scale} for one in self.add_ons.loras]
            recipe["loras"] = json.dumps(loras)
        if self.add_ons.lora_start_step:
            recipe["lora_start_step"] = str(self.add_ons.lora_start_step)
        if self.add_ons.controls:
            recipe["controlnets"] = json.dumps(
                [_control_recipe(one) for one in self.add_ons.controls]
            )
        if self.edit is not None:
            recipe |= edit_recipe(self.edit)
        if self.references:
            digests = [one.image.sha256 for one in self.references]
            recipe["references_sha256"] = json.dumps(digests)
        return recipe


def _control_recipe(use: ControlNetUse) -> dict[str, str | float]:
    """Return what a recipe says of a ControlNet: its image and its map by their digests."""
    return {
        "name": use.name,
        "scale": use.scale,
        "start": use.start,
        "end": use.end,
        "preprocess": use.preprocess,
        "image_sha256": use.sent_sha256,
        "map_sha256": use.image.sha256,
    }


def edit_recipe(edit: Edit) -> dict[str, str]:
    """Return what a recipe says of an edit: its images by their digests."""
    recipe = {"image_sha256": edit.image.sha256, "strength": repr(edit.strength)}
    if edit.mask is not None:
        recipe |= {"mask_sha256": edit.mask.sha256, "paste_back": str(edit.paste_back).lower()}
    if edit.feather_px:
        recipe["feather_px"] = str(edit.feather_px)
    if edit.window is not None:
        recipe["crop"] = "auto"
    return recipe


def granted(requests: Sequence[ImageRequest], num_steps: Sequence[int]) -> tuple[ImageRequest, ...]:
    """Return requests with the steps that admission granted; none given: with all their steps."""
    if not num_steps:
        return tuple(requests)
    return tuple(with_steps(request, num) for request, num in zip(requests, num_steps, strict=True))


def with_steps(request: ImageRequest, num_steps: int) -> ImageRequest:
    """Return a request that takes another number of steps.

    An edit keeps its strength, and LoRAs start after the same share of the steps.
    """
    if num_steps == request.num_steps:
        return request
    if (start := request.add_ons.lora_start_step) > 0:
        start = start * num_steps // request.num_steps
        request = replace(request, add_ons=replace(request.add_ons, lora_start_step=start))
    if request.edit is None:
        return replace(request, num_steps=num_steps)
    is_flow = request.sampler in FLOW_SAMPLER_NAMES
    schedule_steps = steps_of_schedule(num_steps, request.edit.strength, is_flow=is_flow)
    edit = replace(request.edit, schedule_steps=schedule_steps)
    return replace(request, num_steps=num_steps, edit=edit)


def file_name(request_id: str, image_format: ImageFormat) -> str:
    """Return the name of a request's image in the result store."""
    return f"{request_id}.{image_format}"


def candidate_name(request_id: str, stage: int = 0) -> str:
    """Return the name there of an image that is not published, or not yet.

    Args:
        stage: index of the stage that makes it.
    """
    return f"{request_id}.candidate{stage or ''}"


def state_name(request_id: str) -> str:
    """Return the name of a request's exported state in the state store."""
    return f"{request_id}.state"
