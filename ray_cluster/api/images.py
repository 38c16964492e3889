"""``POST /v1/images/generations``: validate, have it made, reply. Nothing is queued here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.auth import caller_of, client_of
from ray_cluster.api.call import Call, CallReader
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.client import DispatcherClient
from ray_cluster.api.errors import ApiError, from_failure
from ray_cluster.api.files import FilesEndpoint, url_maker
from ray_cluster.api.group import GroupRunner, while_connected
from ray_cluster.api.jobs import JobCreator
from ray_cluster.api.reply import MadeImage, write_reply
from ray_cluster.config import ClusterConfig
from ray_cluster.jobs.records import Job
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
        config: ClusterConfig,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._reader = reader
        self._creator = creator
        self._files = files
        self._clock = clock
        # three waits in the time after which the dispatcher takes a client for gone
        self._poll_s = config.dispatch.attached_timeout_s / 3
        self._runner = GroupRunner(client, self._poll_s)

    async def generate(self, request: Request) -> Response:
        """Make images from a text.

        OpenAI's fields and extensions, which are marked so. A field that this service has no
        counterpart for, or that would change nothing, is refused by name. With the header
        `Idempotency-Key` the call is a job: it goes on when the connection ends, and the same call
        sent again answers with the same images.
        """
        call = await self._reader.read(request)
        if call.idempotency_key is None:
            work = self._attached(call.requests, caller_of(request))
            made = await while_connected(request, work)
        else:
            made = await while_connected(request, self._durable(call, request))
        url_of = url_maker(request) if call.fields.response_format == "url" else None
        if url_of is None:
            made = [await self._with_data(image) for image in made]
        content = await write_reply(made, int(self._clock()), url_of)
        return Response(content, media_type="application/json")

    async def _attached(self, requests: Sequence[ImageRequest], client: str) -> list[MadeImage]:
        completed = await self._runner.run(requests, self._catalog.known, client)
        return [
            MadeImage.of(request, item) for request, item in zip(requests, completed, strict=True)
        ]

    async def _durable(self, call: Call, request: Request) -> list[MadeImage]:
        client = client_of(request)
        view, _ = await self._creator.create(call, request)
        while not view.job.is_final:
            later = await self._client.job(client, view.job.job_id, self._poll_s)
            if later is None:
                raise _gone(view.job)
            view = later
        return _images_of(view.job)

    async def _with_data(self, image: MadeImage) -> MadeImage:
        if not image.request.output.is_stored:
            return image
        return image.with_data(await self._files.read(image.request.file_id))


def _images_of(job: Job) -> list[MadeImage]:
    if job.error is not None:
        raise from_failure(job.error)
    if job.state != "completed" or job.finished_s is None:
        raise _gone(job)
    elapsed_s = job.finished_s - job.created_s
    return [
        MadeImage(
            request,
            b"",
            timing=image.timing,
            slo_s=job.slo_s,
            elapsed_s=elapsed_s,
        )
        for request, image in zip(job.requests, job.images, strict=True)
        if image is not None
    ]


def _gone(job: Job) -> ApiError:
    return ApiError(
        HTTPStatus.CONFLICT,
        f"The job of this call, {job.job_id}, was cancelled; use a new Idempotency-Key.",
        code="job_cancelled",
    )
