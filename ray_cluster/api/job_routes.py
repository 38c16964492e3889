"""The routes of ``/v1/jobs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from ray_cluster.api.job_stream import EVENT_NAMES
from ray_cluster.api.jobs import JobsEndpoint
from ray_cluster.api.replies import JobList, JobResponse
from ray_cluster.api.request_schema import event_stream

KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "Your name for this call; sent again, it answers with the same job.",
}
_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 100},
    "description": "The id of the last event that you have; the stream goes on after it.",
}


def add_jobs(
    router: APIRouter,
    jobs: JobsEndpoint,
    errors: Callable[..., dict[int | str, dict[str, Any]]],
    body: dict[str, Any],
) -> None:
    """Add the calls on jobs.

    Args:
        errors: returns the documentation of the replies with these statuses.
        body: the documentation of the body, which the endpoint reads by itself.
    """
    router.add_api_route(
        "/jobs",
        jobs.create,
        methods=["POST"],
        tags=["jobs"],
        summary="Have images made, whoever goes away",
        status_code=202,
        response_model=JobResponse,
        responses={
            200: {"model": JobResponse, "description": "The job that this key has named before."},
            **errors(400, 401, 404, 408, 413, 415, 422, 429, 431, 503),
        },
        openapi_extra={"requestBody": body, "parameters": [KEY_PARAMETER]},
    )
    router.add_api_route(
        "/jobs",
        jobs.list,
        methods=["GET"],
        tags=["jobs"],
        summary="List your jobs",
        response_model=JobList,
        responses=errors(400, 401, 503),
    )
    router.add_api_route(
        "/jobs/{job_id}/events",
        jobs.events,
        methods=["GET"],
        tags=["jobs"],
        summary="Watch a job",
        response_class=StreamingResponse,
        responses={
            200: {
                "content": event_stream(dict.fromkeys(EVENT_NAMES, JobResponse)),
                "description": "The events; each tells the whole job as it is.",
            },
            **errors(401, 404, 429, 503),
        },
        openapi_extra={"parameters": [_LAST_EVENT_ID]},
    )
    _add_one_job(router, jobs, errors)


def _add_one_job(
    router: APIRouter,
    jobs: JobsEndpoint,
    errors: Callable[..., dict[int | str, dict[str, Any]]],
) -> None:
    for method, endpoint, summary in (
        ("GET", jobs.retrieve, "How far is a job?"),
        ("DELETE", jobs.cancel, "Cancel a job"),
    ):
        router.add_api_route(
            "/jobs/{job_id}",
            endpoint,
            methods=[method],
            tags=["jobs"],
            summary=summary,
            response_model=JobResponse,
            responses=errors(401, 404, 503),
        )
