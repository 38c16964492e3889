"""Checks the ControlNets of calls before any work, and has the maps made that they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from ray_cluster.api.advice import missing, wrong
from ray_cluster.api.input.schemas import ControlNetChoice, ImageGenerationRequest
from ray_cluster.api.input.sent_images import SentCall, SentImages, image_text
from ray_cluster.api.input.validation import describe
from ray_cluster.config.loading import Document
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.validation_errors import nearest
from ray_cluster.imaging.controlnet_maps import MapOrder
from ray_cluster.imaging.detectors import DETECTOR_NAMES
from ray_cluster.requests import BlobRef, ControlNetUse, ImageRequest, ModelProfile

_PART_MARK = "@"
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
        if profile.engine == "diffusers":
            what = f"and {model} is run call by call, without ControlNets"
            raise wrong(f"{self.param}.name", f"{name}, {what}", "other model", code=code)
        if profile.family in _TRANSFORMERS:
            what = f"but this image is made by {model}, a diffusion transformer ({profile.family})"
            raise wrong(f"{self.param}.name", f"{name}, {what}", "for unets", code=code)
        if model not in self.bases:
            what = f"which is made for {', '.join(self.bases)}, and this image is made by {model}"
            bases = " or ".join(map(repr, self.bases))
            hint = f"Set 'model' to {bases}, or choose a ControlNet of {model}."
            raise wrong(f"{self.param}.name", f"{name}, {what}", more=hint, code=code)

    def check_range(self, request: ImageRequest) -> None:
        """Refuse a range that holds no whole step of a request.

        Raises:
            InvalidRequest: it names the range.
        """
        start, end = self.choice.span
        num = request.num_steps + (request.sampler == "pndm" and request.num_steps > 1)
        use = ControlNetUse(self.choice.name, self.image, start=start, end=end)
        if not any(use.is_active(step, num) for step in range(num)):
            name = f"{self.param}.{'end' if self.choice.end is not None else 'start'}"
            what = f"leaves no step: of {num} none lies within {start:g} to {end:g} of them"
            least = f"Make the range wider than {2 / num:.3g}, or take more steps."
            raise wrong(name, what, more=least)

    def as_in_body(self) -> dict[str, Any]:
        """Return the entry as a body has it, with its image's digest: equal for equal entries."""
        return {**self.choice.model_dump(exclude_none=True), "image": self.image.sha256}


class ControlNets:
    """Checks the ControlNets of calls and has their maps made."""

    def __init__(self, images: SentImages) -> None:
        self._images = images

    async def read(
        self,
        request: Request,
        fields: ImageGenerationRequest,
        sent: SentCall,
        document: Document,
    ) -> tuple[SentControlNet, ...]:
        """Return the ControlNets of a call; their images are stored once all else is right.

        Raises:
            InvalidRequest: a name, detector, range or image is wrong, or nothing names a part.
            ApiError: an image is too large, or the input store fails.
        """
        choices, files = fields.controlnets or (), sent.files or {}
        params = [f"controlnets[{index}]" for index in range(len(choices))]
        known = {one.name: one for one in document.controlnets}
        found = [self._check(one, param, known) for one, param in zip(choices, params, strict=True)]
        given = zip(sent.controlnet_images, params, strict=False)
        texts = [_image(image, f"{param}.image", sent.files) for image, param in given]
        idle = next((name for name in files if _PART_MARK + name not in texts), None)
        if idle is not None:
            mark = f"'image': '{_PART_MARK}{idle[:100]}'"
            what = "is a file that nothing names; files are allowed for 'image', 'mask', and "
            raise wrong(idle, f"{what}whatever a ControlNet names: {mark}")
        sent_nets = []
        for param, choice, model, text in zip(params, choices, found, texts, strict=True):
            if text.startswith(_PART_MARK):
                ref = files[text.removeprefix(_PART_MARK)]
            else:
                where = f"{param}.image"
                ref = await self._images.store_one(request, text, where, document.limits)
            sent_nets.append(SentControlNet(param, choice, model.bases, ref))
        return tuple(sent_nets)

    async def with_maps(
        self,
        request: Request,
        requests: Sequence[ImageRequest],
        controlnets: Sequence[SentControlNet],
        limits: LimitsConfig,
    ) -> tuple[ImageRequest, ...]:
        """Return the requests of a call with the maps of its ControlNets, made once for all.

        Raises:
            InvalidRequest: an image cannot be decoded, has too many pixels or several frames; or
                its detector fails.
            ApiError: 503 where the input store fails, or there is nothing to decode them.
        """
        if not controlnets:
            return tuple(requests)
        # all have the same size, and edit the same image
        first, uses = requests[0], []
        for one in controlnets:
            choice, edit = one.choice, first.edit
            order = MapOrder(
                detector=choice.detector,
                work_px=first.size_px,
                canvas_px=None if edit is None else edit.canvas_px,
                window=None if edit is None else edit.window,
                param=f"{one.param}.image",
                detector_param=f"{one.param}.preprocess",
            )
            one.check_range(first)
            made = await self._images.make_map(request, one.image, order, limits)
            of_map = (choice.name, made.ref, choice.weight, *choice.span)
            sent = (choice.detector, one.image.sha256, made.made.is_picture)
            uses.append(ControlNetUse(*of_map, *sent))
        return tuple(
            replace(one, add_ons=replace(one.add_ons, controls=tuple(uses))) for one in requests
        )

    def check_detector(self, name: str, param: str) -> None:
        """Refuse a detector that there is not, or not here; raises :class:`InvalidRequest`."""
        detectors = self._images.detectors
        if name not in DETECTOR_NAMES:
            hint = _listed(name, DETECTOR_NAMES, "those of this service", detectors.available())
            raise wrong(param, f"is {describe(name)}, which is no detector", more=hint)
        detectors.check(name, param)

    def _check(
        self, choice: ControlNetChoice, param: str, known: Mapping[str, ControlNetConfig]
    ) -> ControlNetConfig:
        if (found := known.get(choice.name)) is None:
            hint = _listed(choice.name, known, "all", tuple(known) or ("there is none here",))
            what = f"is {describe(choice.name)}, which does not exist"
            raise wrong(f"{param}.name", what, more=hint, code="controlnet_not_found")
        start, end = choice.span
        if start >= end:
            name = f"{param}.{'start' if choice.start is not None else 'end'}"
            what = f"leaves no step: the ControlNet would work from {start:g} to {end:g} of them"
            raise wrong(name, what, more="'start' must be below 'end'.")
        self.check_detector(choice.detector, f"{param}.preprocess")
        return found


def _listed(
    name: str, known: Mapping[str, object] | Sequence[str], what: str, here: Sequence[str]
) -> str:
    """Return what to do about a name that there is not."""
    near = nearest(name, known)
    hint = f"Did you mean {near!r}? " if near else ""
    return f"{hint}GET /v1/controlnets lists {what}: {', '.join(here)}."


def _image(image: object, param: str, files: Mapping[str, BlobRef] | None) -> str:
    """Return the text of a ControlNet's image; of a part of a form, ``@`` and its name."""
    if image is None:
        raise missing(param, "send the image that the ControlNet follows")
    text = image_text(image, param)
    if text.startswith(_PART_MARK) and text.removeprefix(_PART_MARK) not in (files or {}):
        what = "only forms have parts" if files is None else "the form has no such file"
        raise wrong(param, f"names the part {text[1:101]!r}, but {what}", "part")
    return text
