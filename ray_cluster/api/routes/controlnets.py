"""``/v1/controlnets`` lists ControlNets and detectors; ``/v1/preprocess`` makes a map."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.bounded_body import BodyLimit, read_object
from ray_cluster.api.input.image_store import file_id_of
from ray_cluster.api.input.multipart import is_form
from ray_cluster.api.input.schemas import PreprocessRequest
from ray_cluster.api.input.sent_images import MadeMap, SentImages, image_text, no_file
from ray_cluster.api.input.validation import validate_as
from ray_cluster.api.output.reply_writer import append_base64
from ray_cluster.api.output.resource_schemas import ControlNetCard, ControlNetList
from ray_cluster.api.resolve.controlnets import ControlNets
from ray_cluster.api.resolve.resolver import MAX_INLINE_PIXELS
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.imaging.controlnet_maps import MapOrder
from ray_cluster.policies.edits import SizePx
from ray_cluster.requests import BlobRef, size_of


class ControlNetsEndpoint:
    """Says which ControlNets there are, and makes the maps that they follow.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        controlnets: ControlNets,
        images: SentImages,
        settings: CurrentSettings,
        clock: Callable[[], float],
    ) -> None:
        self._controlnets = controlnets
        self._images = images
        self._settings = settings
        self._clock = clock

    async def list(self) -> ControlNetList:
        """List the ControlNets, with the models that each is made for, and the detectors."""
        cards = [
            ControlNetCard(
                id=one.name,
                name=one.name,
                bases=list(one.bases),
                mode=one.mode,
                description=one.description,
            )
            for one in self._settings.document().controlnets
        ]
        return ControlNetList(data=cards, detectors=list(self._images.detectors.available()))

    async def preprocess(self, request: Request) -> Response:
        """Make the map of an image, as a call with this detector would.

        The body is a form with the file `image`, or JSON that holds it in base64. The reply has the
        map itself, and an id by which ControlNets of later calls name it, with `preprocess: none`.
        """
        if is_form(request):
            texts, image = await self._images.read_one(
                request, "image", self._settings.latest.limits
            )
            fields = self._checked(dict(texts))
            return await self._reply(request, fields, image)
        limits = self._settings.latest.limits
        limit = BodyLimit.of_uploads(limits)
        with self._images.memory.share(request, limit, limits) as take:
            body = await read_object(request, limit, may_be_form=True, take=take)
            sent = body.pop("image", None)
            fields = self._checked(body)
            if sent is None:
                raise no_file("image")
            text = image_text(sent, "image")
            image = await self._images.store_one(
                request, text, "image", self._settings.latest.limits
            )
            return await self._reply(request, fields, image)

    def _checked(self, body: dict[str, object]) -> PreprocessRequest:
        fields = validate_as(PreprocessRequest, body, {})
        self._controlnets.check_detector(fields.preprocess, "preprocess")
        if (size_px := _size(fields)) is not None:
            self._check_size(size_px)
        return fields

    def _check_size(self, size_px: SizePx) -> None:
        most = min(self._settings.latest.limits.max_input_pixels, MAX_INLINE_PIXELS)
        width_px, height_px = size_px
        if width_px * height_px > most:
            what = f"asks for a map of {width_px}x{height_px} pixels; at most {most} are allowed"
            raise wrong("size", what, "smaller size")

    async def _reply(self, request: Request, fields: PreprocessRequest, image: BlobRef) -> Response:
        order = MapOrder(fields.preprocess, _size(fields))
        made = await self._images.make_map(request, image, order, self._settings.latest.limits)
        self._check_size(made.made.size_px)
        return Response(await self._content(fields, made), media_type="application/json")

    async def _content(self, fields: PreprocessRequest, made: MadeMap) -> bytes:
        """Return the JSON of a :class:`.PreprocessResponse`."""
        head = {
            "created": int(self._clock()),
            "preprocess": fields.preprocess,
            "size": "{}x{}".format(*made.made.size_px),
            "output_format": "png",
        }
        parts = [json.dumps(head).encode()[:-1], b', "data": [{"b64_json": "']
        await append_base64(parts, made.made.png)
        parts.append(f'", "file_id": "{file_id_of(made.ref)}"}}]}}'.encode())
        return b"".join(parts)


def _size(fields: PreprocessRequest) -> SizePx | None:
    return None if fields.size in {None, "auto"} else size_of(str(fields.size))
