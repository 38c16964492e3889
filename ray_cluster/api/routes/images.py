"""``POST /v1/images/...``: validate, have it made, reply. Nothing is queued here."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.access.auth import caller_of, client_of
from ray_cluster.api.attached_images import GroupRunner, while_connected
from ray_cluster.api.call_reader import EDIT, GENERATION, VARIATION, Call, CallReader
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import ApiError
from ray_cluster.api.output.error_answers import from_failure, from_refusal
from ray_cluster.api.output.event_streams import EventStream, Updates, image_events
from ray_cluster.api.output.image_schemas import EstimateResponse
from ray_cluster.api.output.reply_writer import RepliedImage, as_made, write_reply
from ray_cluster.api.routes.files import FilesEndpoint, url_maker
from ray_cluster.api.routes.jobs import JobCreator
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.jobs import Job, JobView
from ray_cluster.protocol.outcomes import Completed, Preview
from ray_cluster.requests import ImageRequest


class ImagesEndpoint:
    """Turns one call into image requests, and their outcomes into one reply.

    Without an idempotency key the images end with their client; with one the call is a durable
    job, which this endpoint waits for.
    """

    def __init__(
        self,
        *,
        client: DispatcherClient,
        catalog: Catalog,
        reader: CallReader,
        creator: JobCreator,
        files: FilesEndpoint,
        settings: CurrentSettings,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._reader = reader
        self._creator = creator
        self._files = files
        self._clock = clock
        self._settings = settings
        self._runner = GroupRunner(client, self._wait_s, files.delete_later)

    def _wait_s(self) -> float:
        # three waits in the time after which the dispatcher takes a client for gone
        return self._settings.latest.dispatch.attached_timeout_s / 3

    async def generate(self, request: Request) -> Response:
        """Make images from a text.

        OpenAI's fields and extensions, which are marked so. A field that this service has no
        counterpart for, or that would change nothing, is refused by name. With the header
        `Idempotency-Key` the call is a job: it goes on when the connection ends, and the same call
        sent again answers with the same images. With `stream` the image comes as an event, after
        as many previews as `partial_images` says.
        """
        return await self._answer(await self._reader.read(request, GENERATION), request)

    async def estimate(self, request: Request) -> EstimateResponse:
        """Tell when images from a text would be done if they were asked for now.

        The body is that of `POST /v1/images/generations`, with the same errors.
        """
        call = await self._reader.read(request, GENERATION)
        first = call.requests[0]
        offer = await self._client.estimate(call.requests, caller_of(request))
        default_s = self._settings.latest.dispatch.default_slo_s
        slo_s = default_s if first.slo_s is None else first.slo_s
        is_known = offer.accepted and offer.predicted_s > 0
        error = None
        if not offer.accepted:
            error = from_refusal(offer, call.requests, self._catalog.known)
        return EstimateResponse(
            accepted=offer.accepted,
            finish_in_s=offer.predicted_s if is_known else None,
            in_time=is_known and offer.predicted_s <= slo_s,
            deadline_s=slo_s,
            num_inference_steps=offer.num_steps[0] if offer.num_steps else first.num_steps,
            reason=None if error is None else error.code,
            message=None if error is None else error.message,
            retry_in_s=None if error is None else _finite(error.retry_after_s),
        )

    async def edit(self, request: Request) -> Response:
        """Change an image, where a mask says so or everywhere.

        The body is a form with the files `image` and `mask`, or JSON that holds them in base64. All
        fields of `POST /v1/images/generations` are taken too; in a form, what is not a text is JSON
        in one text. With `stream` the events are called `image_edit.*`.
        """
        return await self._answer(await self._reader.read(request, EDIT), request)

    async def vary(self, request: Request) -> Response:
        """Make variations of an image: an edit of everything, which needs no text.

        OpenAI has withdrawn this call; use `POST /v1/images/edits`.
        """
        call = await self._reader.read(request, VARIATION)
        response = await self._answer(call, request)
        response.headers["Deprecation"] = "true"
        return response

    async def _answer(self, call: Call, request: Request) -> Response:
        is_job = call.idempotency_key is not None
        if call.fields.stream:
            updates = (self._job_updates if is_job else self._attached_updates)(call, request)
            events = image_events(call.requests[0], call.event_kind, updates, self._clock)
            # until it is admitted, errors are replies of their own
            await anext(events)
            return EventStream(events)
        work = (self._job_images if is_job else self._attached_images)(call, request)
        made = await while_connected(request, work)
        url_of = url_maker(request) if call.fields.response_format == "url" else None
        content = await write_reply(made, int(self._clock()), url_of)
        return Response(content, media_type="application/json")

    async def _attached_images(self, call: Call, request: Request) -> list[RepliedImage]:
        known, client = self._catalog.known, caller_of(request)
        completed = await self._runner.run(call.requests, known, client)
        return [RepliedImage.of(*one) for one in zip(call.requests, completed, strict=True)]

    async def _attached_updates(self, call: Call, request: Request) -> Updates:
        [wanted] = call.requests
        updates = self._runner.watch(wanted, self._catalog.known, caller_of(request))
        async with aclosing(updates):
            async for one in updates:
                yield RepliedImage.of(wanted, one) if isinstance(one, Completed) else one

    async def _job_images(self, call: Call, request: Request) -> list[RepliedImage]:
        client = client_of(request)
        view, _ = await self._creator.create(call, request)
        while not view.job.is_final:
            job_id = view.job.job_id
            view = _still_there(await self._client.job(client, job_id, self._wait_s()), view.job)
        made = _images_of(view.job)
        if call.fields.response_format == "url":
            return made
        return [await self._with_data(image, view.job) for image in made]

    async def _job_updates(self, call: Call, request: Request) -> Updates:
        client, seen = client_of(request), -1
        view, _ = await self._creator.create(call, request)
        yield None
        while not view.job.is_final:
            job_id, version = view.job.job_id, view.version
            later = await self._client.job_change(client, job_id, version, self._wait_s())
            view = _still_there(later, view.job)
            preview = view.progress[0].preview if view.progress and view.progress[0] else None
            if preview is not None and preview.index > seen:
                seen = preview.index
                yield await self._stored_preview(view.job.requests[0], preview)
            elif view.version == version:
                yield None
        [made] = _images_of(view.job)
        yield await self._with_data(made, view.job)

    async def _stored_preview(self, wanted: ImageRequest, preview: Preview) -> Preview | None:
        try:
            data = await self._files.read(wanted.preview_file_id(preview.index))
        except ApiError:
            data = None
        # without it, the image itself may yet be there
        return None if data is None else replace(preview, data=data)

    async def _with_data(self, image: RepliedImage, job: Job) -> RepliedImage:
        data = await self._files.read(image.request.file_id)
        if data is None:
            raise ApiError(
                HTTPStatus.GONE,
                f"The images of this call's job, {job.job_id}, were made, and are forgotten by "
                "now; use a new Idempotency-Key.",
                code="images_forgotten",
            )
        return replace(image, data=data)


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _images_of(job: Job) -> list[RepliedImage]:
    if job.error is not None:
        raise _job_failed(job, from_failure(job.error))
    if job.state != "completed" or job.finished_s is None:
        raise _cancelled(job)
    elapsed_s = job.finished_s - job.created_s
    return [
        RepliedImage(
            as_made(request, image.num_steps, image.cascade),
            b"",
            image.timing,
            job.slo_s,
            elapsed_s,
            image.cascade,
            image.steps_by_degree,
        )
        for request, image in zip(job.requests, job.images, strict=True)
        if image is not None
    ]


def _job_failed(job: Job, error: ApiError) -> ApiError:
    if error.retry_after_s is None:
        return error
    # the same key names this job, which stays as it has ended
    return ApiError(
        error.status,
        f"{error.message} The job of this call, {job.job_id}, has ended so; use a new "
        "Idempotency-Key.",
        code=error.code,
        retry_after_s=error.retry_after_s,
        retry="asked",
    )


def _still_there(view: JobView | None, job: Job) -> JobView:
    if view is None:
        raise _cancelled(job)
    return view


def _cancelled(job: Job) -> ApiError:
    return ApiError(
        HTTPStatus.CONFLICT,
        f"The job of this call, {job.job_id}, was cancelled; use a new Idempotency-Key.",
        code="job_cancelled",
    )
