"""All routes, with what `/docs` and `/openapi.json` say of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from ray_cluster.api.access.auth import key_guard, role_guard
from ray_cluster.api.access.call_metrics import GatewayMetricsEndpoint
from ray_cluster.api.catalog import ModelsEndpoint
from ray_cluster.api.input.controlnet_schema import ControlNetList, PreprocessResponse
from ray_cluster.api.input.file_ids import FILE_PREFIX
from ray_cluster.api.input.lora_schema import LoraList, LoraRegistration, LoraResponse
from ray_cluster.api.input.schemas import ImagesResponse
from ray_cluster.api.output.event_schema import CompletedEvent, PartialImageEvent
from ray_cluster.api.output.job_stream import EVENT_NAMES
from ray_cluster.api.output.resource_schemas import (
    ErrorResponse,
    JobList,
    JobResponse,
    LoraModelCard,
    ModelCard,
    ModelList,
)
from ray_cluster.api.routes.controlnets import ControlNetsEndpoint
from ray_cluster.api.routes.files import PATH, FilesEndpoint
from ray_cluster.api.routes.health import HealthEndpoint
from ray_cluster.api.routes.images import ImagesEndpoint
from ray_cluster.api.routes.jobs import JobsEndpoint
from ray_cluster.api.routes.loras import LorasEndpoint
from ray_cluster.api.routes.openapi import (
    ERRORS,
    errors,
    event_stream,
    inlined_schema,
    preprocess_body,
    upload_body,
)
from ray_cluster.api.routes.plan import PlanEndpoint
from ray_cluster.api.routes.plan_schema import PlanResponse
from ray_cluster.api.routes.uploaded_files import FileResponse, UploadedFilesEndpoint
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.sections.keys import Role

_IDEMPOTENCY_KEY = {
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
# who may call
_NOBODY: tuple[Role, ...] = ()
_USE: tuple[Role, ...] = ("use",)
_LORAS: tuple[Role, ...] = ("loras",)
_OPERATE: tuple[Role, ...] = ("operate",)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What answers the calls."""

    health: HealthEndpoint
    metrics: GatewayMetricsEndpoint
    files: FilesEndpoint
    images: ImagesEndpoint
    models: ModelsEndpoint
    loras: LorasEndpoint
    controlnets: ControlNetsEndpoint
    uploads: UploadedFilesEndpoint
    jobs: JobsEndpoint
    plan: PlanEndpoint


def add_routes(app: FastAPI, endpoints: Endpoints, settings: CurrentSettings) -> None:
    """Add all routes; those below ``/v1``, apart from files, ask for an API key with a role."""
    public = APIRouter()
    guarded = APIRouter(prefix="/v1", dependencies=[Depends(key_guard(settings))])
    _add_health(public, endpoints)
    _add_files(public, endpoints.files)
    _add_images(guarded, endpoints.images)
    _add_models(guarded, endpoints.models)
    _add_loras(guarded, endpoints.loras)
    _add_controlnets(guarded, endpoints.controlnets)
    _add_uploads(guarded, endpoints.uploads)
    _add_jobs(guarded, endpoints.jobs)
    _add_plan(guarded, endpoints.plan)
    # an uploaded file's id, which needs a key, is not taken for that of a public image
    app.include_router(guarded)
    app.include_router(public)


def _add(
    router: APIRouter,
    call: str,
    endpoint: Callable[..., Any],
    summary: str,
    roles: tuple[Role, ...],
    *,
    responses: dict[int | str, dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """Add one route; what answers ``GET`` answers ``HEAD``, unless it is a stream.

    Args:
        call: method and path.
        roles: of which a key must have one; none for what is public.

    Raises:
        ValueError: no role is named where keys are asked for, or one where none are.
    """
    if bool(roles) != bool(router.dependencies):
        raise ValueError(f"{call}: name a role for what is guarded, and none for what is public")
    method, path = call.split()
    if roles:
        options["dependencies"] = [Depends(role_guard(roles))]
        text = f"The API key has not the role {' or '.join(f'`{one}`' for one in roles)}."
        responses = {**(responses or {}), 403: {"model": ErrorResponse, "description": text}}
    if method == "GET" and not path.endswith("/events"):
        # the server leaves the body out
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, **options)
    router.add_api_route(
        path, endpoint, methods=[method], summary=summary, responses=responses, **options
    )


def _add_health(router: APIRouter, endpoints: Endpoints) -> None:
    health, tags = endpoints.health, ["health"]
    _add(router, "GET /healthz", health.live, "Does it live?", _NOBODY, tags=tags)
    _add(
        router,
        "GET /readyz",
        health.ready,
        "Would a call be served?",
        _NOBODY,
        tags=tags,
        responses=errors(503),
    )
    _add(
        router,
        "GET /metrics",
        endpoints.metrics.scrape,
        "What all processes have counted, for Prometheus",
        _NOBODY,
        tags=tags,
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."},
            **errors(503),
        },
    )


def _add_files(router: APIRouter, files: FilesEndpoint) -> None:
    # a link must work where no header can be sent, as in a page; its id is the key
    _add(
        router,
        f"GET {PATH}/{{file_id}}",
        files.download,
        "Fetch an image that a reply links to",
        _NOBODY,
        tags=["images"],
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The image."},
            304: {"description": "You have it: `If-None-Match` is its ETag."},
            **errors(404, 503),
        },
    )


def _add_images(router: APIRouter, images: ImagesEndpoint) -> None:
    calls = {
        "generations": (images.generate, "Make images", "createImage"),
        "edits": (images.edit, "Edit an image", "createImageEdit"),
        "variations": (images.vary, "Make variations of an image", "createImageVariation"),
    }
    for name, (endpoint, summary, operation_id) in calls.items():
        kind = "image_generation" if name == "generations" else "image_edit"
        _add(
            router,
            f"POST /images/{name}",
            endpoint,
            summary,
            _USE,
            tags=["images"],
            operation_id=operation_id,
            deprecated=name == "variations",
            response_class=Response,
            responses={
                200: {
                    "model": ImagesResponse,
                    "description": "The images; with `stream`, the events "
                    f"`{kind}.partial_image` and `{kind}.completed`.",
                    "content": event_stream(_image_events(kind)),
                },
                **errors(*ERRORS),
            },
            openapi_extra={"parameters": [_IDEMPOTENCY_KEY]},
        )


def _image_events(kind: str) -> dict[str, type[BaseModel]]:
    return {
        f"{kind}.partial_image": PartialImageEvent,
        f"{kind}.completed": CompletedEvent,
        "error": ErrorResponse,
    }


def _add_models(router: APIRouter, models: ModelsEndpoint) -> None:
    _add(
        router,
        "GET /models",
        models.list,
        "List the models that are ready",
        _USE,
        tags=["models"],
        operation_id="listModels",
        response_model=ModelList,
        responses=errors(401, 503),
    )
    _add(
        router,
        "GET /models/{model:path}",
        models.retrieve,
        "Describe a model",
        _USE,
        tags=["models"],
        operation_id="retrieveModel",
        response_model=ModelCard | LoraModelCard,
        responses=errors(401, 404, 503),
    )


def _add_loras(router: APIRouter, loras: LorasEndpoint) -> None:
    one: dict[str, Any] = {"tags": ["loras"], "response_model": LoraResponse}
    schema = inlined_schema(LoraRegistration)
    _add(
        router,
        "POST /loras",
        loras.create,
        "Register a LoRA",
        _LORAS,
        status_code=201,
        responses={
            200: {"model": LoraResponse, "description": "It was registered before, as it is."},
            **errors(400, 401, 404, 408, 409, 413, 415, 431, 503),
        },
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
        **one,
    )
    _add(
        router,
        "GET /loras",
        loras.list,
        "List LoRAs",
        (*_USE, *_LORAS),
        tags=["loras"],
        response_model=LoraList,
        responses=errors(400, 401, 503),
    )
    one["responses"], path = errors(401, 404, 503), "/loras/{name}"
    _add(router, f"GET {path}", loras.retrieve, "Describe a LoRA", (*_USE, *_LORAS), **one)
    _add(router, f"DELETE {path}", loras.remove, "Remove a LoRA", _LORAS, **one)


def _add_controlnets(router: APIRouter, controlnets: ControlNetsEndpoint) -> None:
    tags: list[str | Enum] = ["controlnets"]
    _add(
        router,
        "GET /controlnets",
        controlnets.list,
        "List ControlNets and detectors",
        _USE,
        tags=tags,
        response_model=ControlNetList,
        responses=errors(401, 503),
    )
    _add(
        router,
        "POST /preprocess",
        controlnets.preprocess,
        "Make the map of an image",
        _USE,
        tags=tags,
        response_class=Response,
        responses={
            200: {"model": PreprocessResponse, "description": "The map."},
            **errors(400, 401, 408, 413, 415, 431, 503),
        },
        openapi_extra={"requestBody": preprocess_body()},
    )


def _add_plan(router: APIRouter, plan: PlanEndpoint) -> None:
    options: dict[str, Any] = {"tags": ["plan"], "response_model": PlanResponse}
    options["responses"] = errors(401, 404, 503)
    _add(router, "GET /plan", plan.show, "Show the plan", (*_USE, *_OPERATE), **options)
    _add(router, "POST /plan/pause", plan.pause, "Pause planning", _OPERATE, **options)
    _add(router, "POST /plan/resume", plan.resume, "Resume planning", _OPERATE, **options)


def _add_uploads(router: APIRouter, uploads: UploadedFilesEndpoint) -> None:
    one: dict[str, Any] = {"tags": ["files"], "response_model": FileResponse}
    _add(
        router,
        f"POST {PATH.removeprefix('/v1')}",
        uploads.create,
        "Upload an image",
        _USE,
        operation_id="createFile",
        responses=errors(400, 401, 408, 413, 415, 431, 503),
        openapi_extra={"requestBody": upload_body()},
        **one,
    )
    _add(
        router,
        f"GET {PATH.removeprefix('/v1')}/{FILE_PREFIX}{{digest}}",
        uploads.retrieve,
        "Describe an uploaded image",
        _USE,
        responses=errors(401, 404, 503),
        **one,
    )


def _add_jobs(router: APIRouter, jobs: JobsEndpoint) -> None:
    one: dict[str, Any] = {"tags": ["jobs"], "response_model": JobResponse}
    _add(
        router,
        "POST /jobs",
        jobs.create,
        "Have images made, whoever goes away",
        _USE,
        status_code=202,
        responses={
            200: {"model": JobResponse, "description": "The job that this key has named before."},
            **errors(400, 401, 404, 408, 413, 415, 422, 429, 431, 503),
        },
        openapi_extra={"parameters": [_IDEMPOTENCY_KEY]},
        **one,
    )
    _add(
        router,
        "GET /jobs",
        jobs.list,
        "List your jobs",
        _USE,
        tags=["jobs"],
        response_model=JobList,
        responses=errors(400, 401, 404, 503),
    )
    _add(
        router,
        "GET /jobs/{job_id}/events",
        jobs.events,
        "Watch a job",
        _USE,
        tags=["jobs"],
        response_class=Response,
        responses={
            200: {
                "content": event_stream(dict.fromkeys(EVENT_NAMES, JobResponse)),
                "description": "The events; each tells the whole job as it is.",
            },
            **errors(401, 404, 429, 503),
        },
        openapi_extra={"parameters": [_LAST_EVENT_ID]},
    )
    one["responses"], path = errors(401, 404, 503), "/jobs/{job_id}"
    _add(router, f"GET {path}", jobs.retrieve, "How far is a job?", _USE, **one)
    _add(router, f"DELETE {path}", jobs.cancel, "Cancel a job", _USE, **one)
