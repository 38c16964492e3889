"""All routes, with what `/docs` and `/openapi.json` say of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from ray_cluster.api.access.auth import key_guard, role_guard
from ray_cluster.api.access.call_metrics import GatewayMetricsEndpoint
from ray_cluster.api.input.image_store import FILE_PREFIX
from ray_cluster.api.input.schemas import LoraRegistration
from ray_cluster.api.output.event_streams import EVENT_NAMES
from ray_cluster.api.output.image_schemas import (
    CompletedEvent,
    EstimateResponse,
    ImagesResponse,
    PartialImageEvent,
)
from ray_cluster.api.output.resource_schemas import (
    ControlNetList,
    ErrorResponse,
    FileResponse,
    JobList,
    JobResponse,
    LoraList,
    LoraModelCard,
    LoraResponse,
    ModelCard,
    ModelList,
    PreprocessResponse,
)
from ray_cluster.api.routes.cell import CellEndpoint, CellResponse
from ray_cluster.api.routes.controlnets import ControlNetsEndpoint
from ray_cluster.api.routes.files import PATH, FilesEndpoint, UploadedFilesEndpoint
from ray_cluster.api.routes.health import HealthEndpoint
from ray_cluster.api.routes.images import ImagesEndpoint
from ray_cluster.api.routes.jobs import JobsEndpoint
from ray_cluster.api.routes.loras import LorasEndpoint
from ray_cluster.api.routes.models import ModelsEndpoint
from ray_cluster.api.routes.openapi import (
    ERRORS,
    error,
    errors,
    event_stream,
    inlined_schema,
    preprocess_body,
    upload_body,
)
from ray_cluster.api.routes.page import PageEndpoint
from ray_cluster.api.routes.plan import PlanEndpoint, PlanResponse
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
    cell: CellEndpoint
    page: PageEndpoint


def add_routes(app: FastAPI, endpoints: Endpoints, settings: CurrentSettings) -> None:
    """Add all routes; those below ``/v1``, apart from files, ask for an API key with a role."""
    public = APIRouter()
    guarded = APIRouter(prefix="/v1", dependencies=[Depends(key_guard(settings))])
    _add_public(public, endpoints)
    _add_page(public, endpoints.page)
    _add_images(guarded, endpoints.images)
    _add_models(guarded, endpoints.models)
    _add_loras(guarded, endpoints.loras)
    _add_controlnets(guarded, endpoints.controlnets)
    _add_uploads(guarded, endpoints.uploads)
    _add_jobs(guarded, endpoints.jobs)
    _add_plan(guarded, endpoints.plan)
    _add(
        guarded,
        "GET /cell/events",
        endpoints.cell.events,
        "Watch the cell",
        _OPERATE,
        statuses=(401, 429, 503),
        more={200: {"content": event_stream({"cell": CellResponse}), "description": "The events."}},
        tags=["plan"],
    )
    # an uploaded file's id, which needs a key, is not taken for that of a public image
    # not include_router: that builds each route a second time
    app.router.routes += [*guarded.routes, *public.routes]


def _add(
    router: APIRouter,
    call: str,
    endpoint: Callable[..., Any],
    summary: str,
    roles: tuple[Role, ...],
    *,
    model: Any = None,
    statuses: tuple[int, ...] = (),
    more: dict[int | str, dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """Add one route; what answers ``GET`` answers ``HEAD``, unless it is a stream.

    Args:
        call: method and path.
        roles: of which a key must have one; none for what is public.
        model: of the reply; None where the endpoint returns a response.
        statuses: of the errors that it documents.
        more: further replies.

    Raises:
        ValueError: no role is named where keys are asked for, or one where none are.
    """
    if bool(roles) != bool(router.dependencies):
        raise ValueError(f"{call}: name a role for what is guarded, and none for what is public")
    method, path = call.split()
    responses = {**(more or {}), **(errors(*statuses) if statuses else {})}
    if roles:
        options["dependencies"] = [Depends(role_guard(roles))]
        text = f"The API key has not the role {' or '.join(f'`{one}`' for one in roles)}."
        responses[403] = error(text)
    if model is not None:
        options["response_model"] = model
    elif more:
        options["response_class"] = Response
    if method == "GET" and not path.endswith("/events"):
        # the server leaves the body out
        hidden = {**options, "include_in_schema": False}
        router.add_api_route(path, endpoint, methods=["HEAD"], **hidden)
    router.add_api_route(
        path, endpoint, methods=[method], summary=summary, responses=responses, **options
    )


def _add_public(router: APIRouter, endpoints: Endpoints) -> None:
    add = partial(_add, router, tags=["health"], roles=_NOBODY)
    health, metrics = endpoints.health, endpoints.metrics
    add("GET /healthz", health.live, "Does it live?")
    add("GET /readyz", health.ready, "Would a call be served?", statuses=(503,))
    add(
        "GET /metrics",
        metrics.scrape,
        "What all processes have counted, for Prometheus",
        statuses=(503,),
        more={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}},
    )
    # a link must work where no header can be sent, as in a page; its id is the key
    add(
        f"GET {PATH}/{{file_id}}",
        endpoints.files.download,
        "Fetch an image that a reply links to",
        statuses=(404, 503),
        more={
            200: {"content": {"image/*": {}}, "description": "The image."},
            304: {"description": "You have it: `If-None-Match` is its ETag."},
        },
        tags=["images"],
    )


def _add_page(router: APIRouter, page: PageEndpoint) -> None:
    add = partial(_add, router, roles=_NOBODY, include_in_schema=False)
    add("GET /", page.index, "The page")
    add("GET /page/{name:path}", page.part, "A file of the page")


def _add_images(router: APIRouter, images: ImagesEndpoint) -> None:
    calls = {
        "generations": (images.generate, "Make images", "createImage"),
        "edits": (images.edit, "Edit an image", "createImageEdit"),
        "variations": (images.vary, "Make variations of an image", "createImageVariation"),
    }
    for name, (endpoint, summary, operation_id) in calls.items():
        kind = "image_generation" if name == "generations" else "image_edit"
        partial_image, completed = f"{kind}.partial_image", f"{kind}.completed"
        text = f"The images; with `stream`, the events `{partial_image}` and `{completed}`."
        events: dict[str, type[BaseModel]] = {
            partial_image: PartialImageEvent,
            completed: CompletedEvent,
        }
        content = event_stream({**events, "error": ErrorResponse})
        _add(
            router,
            f"POST /images/{name}",
            endpoint,
            summary,
            _USE,
            statuses=tuple(ERRORS),
            more={200: {"model": ImagesResponse, "description": text, "content": content}},
            tags=["images"],
            operation_id=operation_id,
            deprecated=name == "variations",
            openapi_extra={"parameters": [_IDEMPOTENCY_KEY]},
        )

    _add(
        router,
        "POST /images/estimate",
        images.estimate,
        "Ask when images would be made",
        _USE,
        model=EstimateResponse,
        statuses=tuple(ERRORS),
        tags=["images"],
    )


def _add_models(router: APIRouter, models: ModelsEndpoint) -> None:
    add = partial(_add, router, roles=_USE, tags=["models"])
    add(
        "GET /models",
        models.list,
        "List the models that are ready",
        model=ModelList,
        statuses=(401, 503),
        operation_id="listModels",
    )
    add(
        "GET /models/{model:path}",
        models.retrieve,
        "Describe a model",
        model=ModelCard | LoraModelCard,
        statuses=(401, 404, 503),
        operation_id="retrieveModel",
    )


def _add_loras(router: APIRouter, loras: LorasEndpoint) -> None:
    add, readers = partial(_add, router, tags=["loras"]), (*_USE, *_LORAS)
    text = "It was registered before, as it is."
    content = {"application/json": {"schema": inlined_schema(LoraRegistration)}}
    add(
        "POST /loras",
        loras.create,
        "Register a LoRA",
        _LORAS,
        model=LoraResponse,
        statuses=(400, 401, 404, 408, 409, 413, 415, 431, 503),
        more={200: {"model": LoraResponse, "description": text}},
        status_code=201,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    statuses = (400, 401, 503)
    add("GET /loras", loras.list, "List LoRAs", readers, model=LoraList, statuses=statuses)
    add = partial(add, model=LoraResponse, statuses=(401, 404, 503))
    add("GET /loras/{name}", loras.retrieve, "Describe a LoRA", readers)
    add("DELETE /loras/{name}", loras.remove, "Remove a LoRA", _LORAS)


def _add_controlnets(router: APIRouter, controlnets: ControlNetsEndpoint) -> None:
    add = partial(_add, router, roles=_USE, tags=["controlnets"])
    add(
        "GET /controlnets",
        controlnets.list,
        "List ControlNets and detectors",
        model=ControlNetList,
        statuses=(401, 503),
    )
    add(
        "POST /preprocess",
        controlnets.preprocess,
        "Make the map of an image",
        statuses=(400, 401, 408, 413, 415, 431, 503),
        more={200: {"model": PreprocessResponse, "description": "The map."}},
        openapi_extra={"requestBody": preprocess_body()},
    )


def _add_plan(router: APIRouter, plan: PlanEndpoint) -> None:
    add = partial(_add, router, model=PlanResponse, statuses=(401, 404, 503), tags=["plan"])
    add("GET /plan", plan.show, "Show the plan", (*_USE, *_OPERATE))
    add("POST /plan/pause", plan.pause, "Pause planning", _OPERATE)
    add("POST /plan/resume", plan.resume, "Resume planning", _OPERATE)


def _add_uploads(router: APIRouter, uploads: UploadedFilesEndpoint) -> None:
    add = partial(_add, router, roles=_USE, model=FileResponse, tags=["files"])
    path = PATH.removeprefix("/v1")
    add(
        f"POST {path}",
        uploads.create,
        "Upload an image",
        statuses=(400, 401, 408, 413, 415, 431, 503),
        operation_id="createFile",
        openapi_extra={"requestBody": upload_body()},
    )
    path, text = f"GET {path}/{FILE_PREFIX}{{digest}}", "Describe an uploaded image"
    add(path, uploads.retrieve, text, statuses=(401, 404, 503))


def _add_jobs(router: APIRouter, jobs: JobsEndpoint) -> None:
    add = partial(_add, router, roles=_USE, tags=["jobs"])
    known = {"model": JobResponse, "description": "The job that this key has named before."}
    add(
        "POST /jobs",
        jobs.create,
        "Have images made, whoever goes away",
        model=JobResponse,
        statuses=(400, 401, 404, 408, 413, 415, 422, 429, 431, 503),
        more={200: known},
        status_code=202,
        openapi_extra={"parameters": [_IDEMPOTENCY_KEY]},
    )
    statuses = (400, 401, 404, 503)
    add("GET /jobs", jobs.list, "List your jobs", model=JobList, statuses=statuses)
    content = event_stream(dict.fromkeys(EVENT_NAMES, JobResponse))
    text = "The events; each tells the whole job as it is."
    add(
        "GET /jobs/{job_id}/events",
        jobs.events,
        "Watch a job",
        statuses=(401, 404, 429, 503),
        more={
            200: {"content": content, "description": text},
            204: {"description": "The job has ended, and `Last-Event-ID` is its last event's."},
        },
        openapi_extra={"parameters": [_LAST_EVENT_ID]},
    )
    add = partial(add, model=JobResponse, statuses=(401, 404, 503))
    add("GET /jobs/{job_id}", jobs.retrieve, "How far is a job?")
    add("DELETE /jobs/{job_id}", jobs.cancel, "Cancel a job")
