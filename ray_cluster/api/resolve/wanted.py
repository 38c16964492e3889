"""What a call asks for, before it is known which model makes it; and what a model makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.schemas import ControlNetChoice, ImageEditRequest, ImageGenerationRequest
from ray_cluster.api.input.sent_images import CheckedImages
from ray_cluster.api.resolve.edits import resolve_edit
from ray_cluster.api.resolve.fidelity import check_unmeasured
from ray_cluster.api.resolve.generation import resolve
from ray_cluster.api.resolve.loras import BasedLora, beside_loras, with_loras
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.requests import BlobRef, ImageRequest, ModelProfile

# diffusion transformers, by the family that a model registers
_TRANSFORMERS = {"stable-diffusion-3", "flux"}


@dataclass(frozen=True, slots=True)
class SentControlNet:
    """A ControlNet of a call, and the image that was sent for it.

    Attributes:
        param: its entry in the call, for errors.
        bases: models that it is made for.
        image: what was sent, in the input store.
    """

    param: str
    choice: ControlNetChoice
    bases: tuple[str, ...]
    image: BlobRef

    def check_model(self, profile: ModelProfile) -> None:
        """Refuse a model that it is not made for.

        Raises:
            InvalidRequest: it names the ControlNet's bases.
        """
        model, name, code = profile.model, f"is {self.choice.name!r}", "controlnet_of_another_model"
        if profile.family in _TRANSFORMERS:
            what = f"but this image is made by {model}, a diffusion transformer ({profile.family})"
            raise wrong(f"{self.param}.name", f"{name}, {what}", "for unets", code=code)
        if model not in self.bases:
            what = f"which is made for {', '.join(self.bases)}, and this image is made by {model}"
            bases = " or ".join(map(repr, self.bases))
            hint = f"Set 'model' to {bases}, or choose a ControlNet of {model}."
            raise wrong(f"{self.param}.name", f"{name}, {what}", more=hint, code=code)

    def as_in_body(self) -> dict[str, Any]:
        """Return the entry as a body has it, with its image's digest: equal for equal entries."""
        return {**self.choice.model_dump(exclude_none=True), "image": self.image.sha256}


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
        return resolve(self.fields, profile, limits, is_stored=self.is_stored)
