"""Builds the HTTP application of one gateway."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI

from ray_cluster.api.access.call_metrics import (
    CallMiddleware,
    GatewayMetrics,
    GatewayMetricsEndpoint,
)
from ray_cluster.api.access.middleware import (
    BrowserMiddleware,
    HeaderWriter,
    LimitsMiddleware,
    RequestIdMiddleware,
)
from ray_cluster.api.access.proxies import ProxyMiddleware
from ray_cluster.api.call_reader import CallReader
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.output.error_answers import UnexpectedErrorMiddleware, install
from ray_cluster.api.resolve.controlnets import ControlNets
from ray_cluster.api.resolve.loras import LoraResolver
from ray_cluster.api.resolve.prompts import PromptCheck
from ray_cluster.api.resolve.resolver import RequestResolver
from ray_cluster.api.routes.cell import CellEndpoint
from ray_cluster.api.routes.controlnets import ControlNetsEndpoint
from ray_cluster.api.routes.files import FilesEndpoint, UploadedFilesEndpoint
from ray_cluster.api.routes.health import HealthEndpoint
from ray_cluster.api.routes.images import ImagesEndpoint
from ray_cluster.api.routes.jobs import JobCreator, JobsEndpoint
from ray_cluster.api.routes.loras import LorasEndpoint
from ray_cluster.api.routes.models import ModelsEndpoint
from ray_cluster.api.routes.openapi import describe_by_settings
from ray_cluster.api.routes.page import PageEndpoint
from ray_cluster.api.routes.plan import PlanEndpoint
from ray_cluster.api.routes.table import Endpoints, add_routes
from ray_cluster.api.settings import CurrentSettings, SettingsFeed
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.storage.blob_store import BlobStore

DESCRIPTION = """\
Makes and edits images on diffusion models, through the OpenAI Images API with extensions.

Errors have OpenAI's form. `x-should-retry: false` says that the same call would fail again;
`Retry-After` on 429 and 503 says when another try should succeed. Every reply has an
`X-Request-ID`.
"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a gateway runs in.

    Attributes:
        request_id_writer: who puts X-Request-ID on replies; "proxy" behind Ray Serve.
        own_metrics: counts this gateway's calls, for others who read them, too.
        warnings: returns what /readyz should report to an operator now.
        feed: started and stopped with the application; None if the settings never change.
    """

    request_id_writer: HeaderWriter = "app"
    own_metrics: GatewayMetrics | None = None
    warnings: Callable[[], Sequence[str]] = tuple
    feed: SettingsFeed | None = None


def create_app(
    client: DispatcherClient,
    settings: CurrentSettings,
    *,
    clock: Callable[[], float] = time.time,
    results: BlobStore,
    images: SentImages,
    around: Surroundings | None = None,
) -> FastAPI:
    """Return the ASGI application of one gateway.

    Args:
        settings: present limits, keys and models; they may change at any moment.
        results: holds the images that replies link to.
        images: keeps and checks those that calls send.
        clock: Unix time in seconds.
        around: what it runs in; nothing of the kind unless given.
    """
    around = around or Surroundings()
    app = _plain_app(around.feed)
    metrics = GatewayMetricsEndpoint(client, around.own_metrics or GatewayMetrics())
    _add_middleware(app, settings, metrics, around.request_id_writer)
    install(app)
    catalog = Catalog(client, settings, clock)
    controlnets = ControlNets(images)
    resolver = RequestResolver(
        catalog, PromptCheck(client), LoraResolver(client, catalog), controlnets
    )
    reader = CallReader(resolver, controlnets, settings=settings, images=images)
    creator = JobCreator(client, catalog, settings, clock)
    files = FilesEndpoint(results, settings)
    endpoints = Endpoints(
        health=HealthEndpoint(client, catalog, settings, around.warnings),
        metrics=metrics,
        files=files,
        images=ImagesEndpoint(
            client=client,
            catalog=catalog,
            reader=reader,
            creator=creator,
            files=files,
            settings=settings,
            clock=clock,
        ),
        models=ModelsEndpoint(catalog, client),
        loras=LorasEndpoint(client, catalog, settings, images.memory),
        controlnets=ControlNetsEndpoint(controlnets, images, settings, clock),
        uploads=UploadedFilesEndpoint(images, settings, clock),
        jobs=JobsEndpoint(client, reader, creator, settings, clock),
        plan=PlanEndpoint(client, clock),
        cell=CellEndpoint(client, settings, clock),
        page=PageEndpoint(settings),
    )
    add_routes(app, endpoints, settings)
    describe_by_settings(app, settings)
    return app


def _plain_app(feed: SettingsFeed | None) -> FastAPI:
    # the page at /docs takes its scripts from a CDN; /openapi.json needs no network
    return FastAPI(
        title="ray-cluster",
        version=_version(),
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
        lifespan=_lifespan(feed),
    )


def _add_middleware(
    app: FastAPI, settings: CurrentSettings, metrics: GatewayMetricsEndpoint, writer: HeaderWriter
) -> None:
    """Add what every call passes through, the innermost first."""
    app.add_middleware(LimitsMiddleware, settings=settings)
    app.add_middleware(CallMiddleware, endpoint=metrics)
    app.add_middleware(UnexpectedErrorMiddleware)
    app.add_middleware(RequestIdMiddleware, writer=writer)
    app.add_middleware(BrowserMiddleware, settings=settings)
    app.add_middleware(ProxyMiddleware, settings=settings)


def _lifespan(feed: SettingsFeed | None) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def live(_app: FastAPI) -> AsyncIterator[None]:
        if feed is not None:
            await feed.start()
        yield
        if feed is not None:
            feed.stop()

    return live


def _version() -> str:
    try:
        return version("ray-cluster")
    except PackageNotFoundError:
        # run from a working_dir that was never installed
        return "unknown"
