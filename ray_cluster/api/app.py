"""Binds the HTTP API: OpenAI's images endpoint, models, health, interactive documentation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import Response

from ray_cluster.api.auth import key_guard
from ray_cluster.api.call import CallReader
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.files import PATH, FilesEndpoint
from ray_cluster.api.gateway_metrics import GatewayMetrics
from ray_cluster.api.handlers import install
from ray_cluster.api.health import HealthEndpoint
from ray_cluster.api.images import ImagesEndpoint
from ray_cluster.api.job_routes import KEY_PARAMETER, add_jobs
from ray_cluster.api.jobs import JobCreator, JobsEndpoint
from ray_cluster.api.limits import LimitsMiddleware
from ray_cluster.api.metrics import CallMiddleware, GatewayMetricsEndpoint
from ray_cluster.api.models import ModelsEndpoint
from ray_cluster.api.openapi import describe_by_settings, json_body
from ray_cluster.api.replies import ErrorResponse, ModelCard, ModelList
from ray_cluster.api.request_id import HeaderWriter, RequestIdMiddleware
from ray_cluster.api.request_schema import event_stream
from ray_cluster.api.schema import CompletedEvent, ImagesResponse, PartialImageEvent
from ray_cluster.api.settings import CurrentSettings, SettingsFeed
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.storage.blob_store import BlobStore

DESCRIPTION = """\
Makes images from text on diffusion models, through the OpenAI Images API with extensions.

Errors have OpenAI's form. `x-should-retry: false` says that the same call would fail again;
`Retry-After` on 429 and 503 says when another try should succeed. Every reply has an
`X-Request-ID`.
"""

_ERRORS = {
    400: "A parameter is wrong: the message says what was given and what is allowed.",
    401: "No valid API key (only where the service is configured with keys).",
    404: "There is no such thing (model, job, file), or not any more.",
    408: "The body has not arrived in time.",
    409: "The job of this `Idempotency-Key` was cancelled.",
    410: "The images of this `Idempotency-Key` were made, and are forgotten by now.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "The `Idempotency-Key` has named a call with another body.",
    429: "The queue is full, or you have too much in flight; `Retry-After` says when to come back.",
    431: "The path and the headers are too large.",
    500: "The model failed on this request.",
    503: "The model is loading, or the dispatcher does not answer; try again.",
}


def create_app(
    client: DispatcherClient,
    settings: CurrentSettings,
    *,
    clock: Callable[[], float] = time.time,
    results: BlobStore,
    request_id_writer: HeaderWriter = "app",
    own_metrics: GatewayMetrics | None = None,
    warnings: Callable[[], Sequence[str]] = tuple,
    feed: SettingsFeed | None = None,
) -> FastAPI:
    """Return the ASGI application of one gateway.

    Args:
        settings: what it goes by at each moment.
        results: where the images are that replies link to.
        clock: Unix time in seconds.
        request_id_writer: who puts X-Request-ID on replies; "proxy" behind Ray Serve.
        own_metrics: where this gateway's calls are counted, for whoever else wants to read it.
        warnings: returns what /readyz should tell an operator now.
        feed: started and stopped with the application; None if the settings stay.
    """
    catalog = Catalog(client, settings, clock)
    health = HealthEndpoint(client, catalog, warnings)
    # the page at /docs takes its scripts from a CDN; /openapi.json needs no network
    app = FastAPI(
        title="ray-cluster",
        version=_version(),
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
        lifespan=_lifespan(feed),
    )
    metrics = GatewayMetricsEndpoint(client, own_metrics or GatewayMetrics())
    app.add_middleware(LimitsMiddleware, settings=settings)
    app.add_middleware(CallMiddleware, endpoint=metrics)
    app.add_middleware(RequestIdMiddleware, writer=request_id_writer)
    install(app, request_id_writer)
    app.include_router(_health_router(health, metrics))
    reader = CallReader(catalog, settings)
    creator = JobCreator(client, catalog, settings, clock)
    files = FilesEndpoint(results, settings)
    images = ImagesEndpoint(
        client=client,
        catalog=catalog,
        reader=reader,
        creator=creator,
        files=files,
        settings=settings,
        clock=clock,
    )
    jobs = JobsEndpoint(client, reader, creator, settings, clock)
    app.include_router(_files_router(files))
    app.include_router(_api_router(images, ModelsEndpoint(catalog), jobs, settings))
    describe_by_settings(app, settings)
    return app


def _lifespan(feed: SettingsFeed | None) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def live(_app: FastAPI) -> AsyncIterator[None]:
        if feed is not None:
            await feed.start()
        yield
        if feed is not None:
            feed.stop()

    return live


def _health_router(health: HealthEndpoint, metrics: GatewayMetricsEndpoint) -> APIRouter:
    router = APIRouter(tags=["health"])
    router.add_api_route("/healthz", health.live, methods=["GET"], summary="Does it live?")
    router.add_api_route(
        "/readyz",
        health.ready,
        methods=["GET"],
        summary="Would a call be served?",
        responses=_errors(503),
    )
    router.add_api_route(
        "/metrics",
        metrics.scrape,
        methods=["GET"],
        summary="What all processes have counted, for Prometheus",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."},
            **_errors(503),
        },
    )
    return router


def _files_router(files: FilesEndpoint) -> APIRouter:
    # a link must work where no header can be sent, as in a page; its id is the key
    router = APIRouter(tags=["images"])
    router.add_api_route(
        PATH + "/{file_id}",
        files.download,
        methods=["GET"],
        summary="Fetch an image that a reply links to",
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The image."},
            304: {"description": "You have it: `If-None-Match` is its ETag."},
            **_errors(404, 503),
        },
    )
    return router


def _api_router(
    images: ImagesEndpoint, models: ModelsEndpoint, jobs: JobsEndpoint, settings: CurrentSettings
) -> APIRouter:
    body = json_body(settings)
    router = APIRouter(prefix="/v1", dependencies=[Depends(key_guard(settings))])
    router.add_api_route(
        "/images/generations",
        images.generate,
        methods=["POST"],
        tags=["images"],
        summary="Make images",
        operation_id="createImage",
        response_class=Response,
        responses={
            200: {
                "model": ImagesResponse,
                "description": "The images; with `stream`, the events "
                "`image_generation.partial_image` and `image_generation.completed`.",
                "content": event_stream(
                    {
                        "image_generation.partial_image": PartialImageEvent,
                        "image_generation.completed": CompletedEvent,
                        "error": ErrorResponse,
                    }
                ),
            },
            **_errors(*_ERRORS),
        },
        # the endpoint reads the body itself, bounded and strictly; the schema is told here
        openapi_extra={"requestBody": body, "parameters": [KEY_PARAMETER]},
    )
    _add_models(router, models)
    add_jobs(router, jobs, _errors, body)
    return router


def _add_models(router: APIRouter, models: ModelsEndpoint) -> None:
    router.add_api_route(
        "/models",
        models.list,
        methods=["GET"],
        tags=["models"],
        summary="List the models that are ready",
        operation_id="listModels",
        response_model=ModelList,
        responses=_errors(401, 503),
    )
    router.add_api_route(
        "/models/{model:path}",
        models.retrieve,
        methods=["GET"],
        tags=["models"],
        summary="Describe a model",
        operation_id="retrieveModel",
        response_model=ModelCard,
        responses=_errors(401, 404, 503),
    )


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    told: dict[int | str, str] = {status: _ERRORS[status] for status in statuses}
    # also keeps FastAPI from documenting its own 422, which this API never sends
    told["default"] = "Any other error."
    return {key: {"model": ErrorResponse, "description": text} for key, text in told.items()}


def _version() -> str:
    try:
        return version("ray-cluster")
    except PackageNotFoundError:
        # run from a working_dir that was never installed
        return "unknown"
