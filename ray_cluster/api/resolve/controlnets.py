"""Checks the ControlNets of calls before any work, and has the maps made that they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from starlette.requests import Request

from ray_cluster.api.input.controlnet_schema import ControlChoice
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.input.sent_images import SentImages, image_text
from ray_cluster.api.input.validation import describe
from ray_cluster.api.resolve.controlnet_choices import FIELD, SentControl
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.validation_errors import nearest
from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.controlnet_maps import MapOrder
from ray_cluster.imaging.detectors import DETECTOR_NAMES
from ray_cluster.protocol.settings import ControlNetEntry
from ray_cluster.requests import BlobRef, ControlNetUse, ImageRequest

_PART_MARK = "@"


class ControlNets:
    """Checks the ControlNets of calls and has their maps made."""

    def __init__(self, settings: CurrentSettings, images: SentImages) -> None:
        self._settings = settings
        self._images = images

    async def read(
        self,
        request: Request,
        fields: ImageGenerationRequest,
        images: Sequence[object],
        files: Mapping[str, BlobRef] | None = None,
    ) -> tuple[SentControl, ...]:
        """Return the ControlNets of a call; their images are stored once all else is right.

        Args:
            images: as of :func:`take_control_images`.
            files: parts of the call's form by name; None for JSON.

        Raises:
            InvalidRequest: a name, detector, range or image is wrong, or nothing names a part.
            ApiError: an image is too large, or the input store fails.
        """
        choices = fields.controlnets or ()
        params = [f"{FIELD}[{index}]" for index in range(len(choices))]
        found = [self._check(one, param) for one, param in zip(choices, params, strict=True)]
        given = zip(images, params, strict=False)
        texts = [_image(image, f"{param}.image", files) for image, param in given]
        idle = next((name for name in files or () if _PART_MARK + name not in texts), None)
        if idle is not None:
            raise InvalidRequest(
                f"The part {idle!r} is a file that nothing names; files are allowed for 'image', "
                f"'mask', and whatever a ControlNet names: 'image': '{_PART_MARK}{idle[:100]}'.",
                idle,
            )
        refs = [
            (files or {})[text.removeprefix(_PART_MARK)]
            if text.startswith(_PART_MARK)
            else await self._images.store_one(
                request, text, f"{param}.image", self._settings.limits
            )
            for text, param in zip(texts, params, strict=True)
        ]
        return tuple(
            SentControl(param, choice, model.bases, ref)
            for param, choice, model, ref in zip(params, choices, found, refs, strict=True)
        )

    async def with_maps(
        self,
        request: Request,
        requests: Sequence[ImageRequest],
        controls: Sequence[SentControl],
    ) -> tuple[ImageRequest, ...]:
        """Return the requests of a call with the maps of its ControlNets, made once for all.

        Raises:
            InvalidRequest: an image cannot be decoded, has too many pixels or several frames; or
                its detector fails.
            ApiError: 503 where the input store fails, or there is nothing to decode them.
        """
        if not controls:
            return tuple(requests)
        # all have the same size, and edit the same image
        first, uses = requests[0], []
        for control in controls:
            choice, edit = control.choice, first.edit
            order = MapOrder(
                detector=choice.detector,
                work_px=first.size_px,
                canvas_px=None if edit is None else edit.canvas_px,
                window=None if edit is None else edit.window,
                param=f"{control.param}.image",
                detector_param=f"{control.param}.preprocess",
            )
            made = await self._images.make_map(request, control.image, order, self._settings.limits)
            start, end = choice.span
            uses.append(
                ControlNetUse(
                    choice.name,
                    made.ref,
                    choice.weight,
                    start,
                    end,
                    choice.detector,
                    control.image.sha256,
                )
            )
        return tuple(
            replace(one, add_ons=replace(one.add_ons, controls=tuple(uses))) for one in requests
        )

    def check_detector(self, name: str, param: str) -> None:
        """Refuse a detector that there is not, or not here; raises :class:`InvalidRequest`."""
        if name not in DETECTOR_NAMES:
            near = nearest(name, DETECTOR_NAMES)
            hint = f"Did you mean {near!r}? " if near else ""
            raise InvalidRequest(
                f"The parameter {param!r} is {describe(name)}, which is no detector. {hint}GET "
                "/v1/controlnets lists those of this service: "
                f"{', '.join(self._images.detectors.available())}.",
                param,
            )
        self._images.detectors.check(name, param)

    def _check(self, choice: ControlChoice, param: str) -> ControlNetEntry:
        known = {one.name: one for one in self._settings.controlnets}
        if (found := known.get(choice.name)) is None:
            near = nearest(choice.name, known)
            hint = f"Did you mean {near!r}? " if near else ""
            listed = ", ".join(known) or "there is none here"
            raise InvalidRequest(
                f"The parameter '{param}.name' is {describe(choice.name)}, which does not exist. "
                f"{hint}GET /v1/controlnets lists all: {listed}.",
                f"{param}.name",
                "controlnet_not_found",
            )
        start, end = choice.span
        if start >= end:
            name = f"{param}.{'start' if choice.start is not None else 'end'}"
            raise InvalidRequest(
                f"The parameter {name!r} leaves no step: the ControlNet would work from {start:g} "
                f"to {end:g} of them. 'start' must be below 'end'.",
                name,
            )
        self.check_detector(choice.detector, f"{param}.preprocess")
        return found


def _image(image: object, param: str, files: Mapping[str, BlobRef] | None) -> str:
    """Return the text of a ControlNet's image; of a part of a form, ``@`` and its name."""
    if image is None:
        raise InvalidRequest(
            f"The parameter {param!r} is required: send the image that the ControlNet follows.",
            param,
            "missing_required_parameter",
        )
    text = image_text(image, param)
    if text.startswith(_PART_MARK) and text.removeprefix(_PART_MARK) not in (files or {}):
        what = "only forms have parts" if files is None else "the form has no such file"
        raise InvalidRequest(
            f"The parameter {param!r} names the part {text[1:101]!r}, but {what}. Send the image "
            "in base64, or the id of an uploaded file.",
            param,
        )
    return text
