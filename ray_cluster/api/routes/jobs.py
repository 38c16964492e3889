"""``/v1/jobs``: images that are made whether or not anybody waits for them."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.access.auth import caller_of, client_of
from ray_cluster.api.call_reader import IDEMPOTENCY_KEY, JOB, Call, CallReader
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import ApiError, not_found
from ray_cluster.api.input.validation import check_query
from ray_cluster.api.output.error_answers import from_refusal
from ray_cluster.api.output.event_streams import OPENING, EventStream, JobStream, StreamSlots
from ray_cluster.api.output.reply_writer import job_reply
from ray_cluster.api.output.resource_schemas import JobList, JobResponse
from ray_cluster.api.routes.files import url_maker, url_of
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.jobs import Job, JobQuery, JobState, JobView
from ray_cluster.protocol.jobs import client_of as jobs_client_of

MAX_PAGE = 100
_LIST_PARAMETERS = ("state", "limit", "after")
# others are never looked for: what a URL can hold, not every store can
_JOB_ID = re.compile(r"job-[0-9a-f]{32}")


class JobCreator:
    """Hands calls to the dispatcher as durable jobs."""

    def __init__(
        self,
        client: DispatcherClient,
        catalog: Catalog,
        settings: CurrentSettings,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._settings = settings
        self._clock = clock

    async def create(self, call: Call, request: Request) -> tuple[JobView, bool]:
        """Return the job of a call and whether it is new: the same key names the same job.

        Raises:
            ApiError: refused, or its key names a job with another body.
        """
        given_s = call.fields.slo_s
        default_s = self._settings.latest.dispatch.default_slo_s
        slo_s = default_s if given_s is None else given_s
        job_id = f"job-{secrets.token_hex(16)}"
        creation = await self._client.create_job(
            Job(
                job_id=job_id,
                client=jobs_client_of(client_of(request)),
                requests=tuple(replace(one, job_id=job_id) for one in call.requests),
                slo_s=slo_s,
                created_s=self._clock(),
                body_digest=call.body_digest,
                idempotency_key=call.idempotency_key,
                images=(None,) * len(call.requests),
            )
        )
        if creation.view is None:
            raise from_refusal(creation.offer, call.requests, self._catalog.known)
        # for the log
        request.state.job_id = creation.view.job.job_id
        if not creation.is_new and creation.view.job.body_digest != call.body_digest:
            raise ApiError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"The header {IDEMPOTENCY_KEY!r} has named another call: the body was not this "
                "one. Send the same body, or a new key.",
                code="idempotency_key_reused",
                param=IDEMPOTENCY_KEY,
            )
        return creation.view, creation.is_new


class JobsEndpoint:
    """Creates, shows and cancels jobs; a caller sees only their own."""

    def __init__(
        self,
        client: DispatcherClient,
        reader: CallReader,
        creator: JobCreator,
        settings: CurrentSettings,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._reader = reader
        self._creator = creator
        self._settings = settings
        self._slots = StreamSlots()
        self._clock = clock

    async def create(self, request: Request, response: Response) -> JobResponse:
        """Accept a job: it will be made, though this connection or any process end.

        The body is that of `POST /v1/images/generations`, or of `POST /v1/images/edits`. With the
        header `Idempotency-Key`, the same call sent again answers with the same job (status 200
        instead of 202).
        """
        call = await self._reader.read(request, JOB)
        view, is_new = await self._creator.create(call, request)
        response.status_code = HTTPStatus.ACCEPTED if is_new else HTTPStatus.OK
        response.headers["Location"] = url_of(request, f"/v1/jobs/{view.job.job_id}")
        return self._reply(view, request)

    async def retrieve(self, job_id: str, request: Request) -> JobResponse:
        """Tell of a job: its state, how far it is, where its images are."""
        return self._reply(await self._view(request, job_id), request)

    async def events(self, job_id: str, request: Request) -> Response:
        """Stream a job's events (SSE): queued, started, progress, preview, and its end.

        Each event's data is the job as `GET /v1/jobs/{id}` shows it. With `Last-Event-ID`, which
        browsers send by themselves, a stream goes on after that event, on any gateway; after the
        last one there is none, and the status 204 tells a browser not to come again.
        """
        view = await self._view(request, job_id)
        if view.job.is_final and request.headers.get("Last-Event-ID") == view.version:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        events = self._events(view, request)
        # before there is a slot, errors are replies of their own
        await anext(events)
        return EventStream(events, OPENING)

    async def _events(self, view: JobView, request: Request) -> AsyncGenerator[bytes]:
        """Yield a job's events, first nothing once there is a slot for the stream."""
        limits = self._settings.latest.limits
        stream = JobStream(self._client, client_of(request), view, max_s=limits.max_stream_s)
        with self._slots.slot(caller_of(request), limits.max_streams_per_client):
            yield b""
            async for event in stream.events(
                request.headers.get("Last-Event-ID", ""),
                lambda news: self._reply(news, request).model_dump_json(),
            ):
                yield event

    async def list(
        self,
        request: Request,
        state: JobState | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        after: Annotated[str | None, Query(max_length=100)] = None,
    ) -> JobList:
        """List jobs, the newest first; `after` is the `last_id` of the page before."""
        check_query(request, _LIST_PARAMETERS)
        if after is not None and _JOB_ID.fullmatch(after) is None:
            raise _not_found(after, "after")
        client = client_of(request)
        page = await self._client.jobs(JobQuery(client, state, limit, after))
        if not page.views and after is not None and await self._client.job(client, after) is None:
            raise _not_found(after, "after")
        data = [self._reply(view, request) for view in page.views]
        return JobList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=page.has_more,
        )

    async def cancel(self, job_id: str, request: Request) -> JobResponse:
        """End a job now and delete what was made; one that has ended stays as it is."""
        _check_id(job_id)
        view = await self._client.cancel_job(client_of(request), job_id)
        return self._reply(_found(view, job_id), request)

    async def _view(self, request: Request, job_id: str) -> JobView:
        _check_id(job_id)
        return _found(await self._client.job(client_of(request), job_id), job_id)

    def _reply(self, view: JobView, request: Request) -> JobResponse:
        return job_reply(view, url_maker(request), self._clock())


def _check_id(job_id: str) -> None:
    if _JOB_ID.fullmatch(job_id) is None:
        raise _not_found(job_id)


def _found(view: JobView | None, job_id: str) -> JobView:
    if view is None:
        raise _not_found(job_id)
    return view


def _not_found(job_id: str, param: str = "id") -> ApiError:
    return not_found(
        f"There is no job {job_id[:100]!r}; GET /v1/jobs lists yours. Old ones are forgotten.",
        "job_not_found",
        param,
    )
