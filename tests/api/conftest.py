"""The HTTP API on a fake dispatcher: in-process, and on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.policies.steps.previews import preview_steps
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.requests import ModelProfile
from ray_cluster.storage.blob_store import BlobStore
from tests.fakes import (
    FakeDispatcherClient,
    memory_results,
    model_profile,
    registration,
    sent_images,
    settings_for,
)
from tests.jobs.jobs_cell import JobsCell, Replica
from tests.quick_server import QuickServer

NOW_S = 1_750_000_000.0

Serve = Callable[[FastAPI], str]


def app_of(
    client: DispatcherClient,
    config: ClusterConfig,
    *,
    results: BlobStore | None = None,
    images: SentImages | None = None,
) -> FastAPI:
    """A gateway; what it stores is in memory unless given."""
    return create_app(
        client,
        settings_for(config),
        results=results or memory_results(),
        images=images or sent_images(),
    )


def http_of(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    """A client of a gateway in this process."""
    transport = httpx.ASGITransport(app, **options)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def shapes_profile() -> ModelProfile:
    samplers = {"ddim": 100, "euler": 100, "lcm": 50}
    return replace(model_profile("shapes"), max_steps_by_sampler=samplers)


@pytest.fixture
def config() -> ClusterConfig:
    return shapes_config()


def shapes_config() -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "pools": [
                {"name": "shapes", "model": "shapes-sd"},
                {"name": "late", "model": "some/folder"},
            ],
            "limits": {
                "max_prompt_chars": 200,
                "max_body_bytes": 4096,
                "max_streams_per_client": 4,
            },
        }
    )


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return FakeDispatcherClient(shapes_profile())


@pytest.fixture
def app(fake: FakeDispatcherClient, config: ClusterConfig) -> FastAPI:
    return create_app(
        fake,
        settings_for(config),
        clock=lambda: NOW_S,
        results=memory_results(),
        images=sent_images(),
    )


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(app, raise_app_exceptions=False) as client:
        yield client


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[JobsCell]:
    async with JobsCell(tmp_path) as running:
        yield running


@pytest.fixture
async def replica(cell: JobsCell) -> Replica:
    """One of the model "shapes" in the cell."""
    one = Replica(cell, model="shapes")
    one.epoch = await cell.dispatch.register(
        replace(registration("r", "shapes"), profile=shapes_profile())
    )
    return one


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves an app with uvicorn in a thread; returns its URL."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(_serving(app))


@contextlib.contextmanager
def _serving(app: FastAPI) -> Iterator[str]:
    settings = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = QuickServer(settings)
    socket = settings.bind_socket()
    socket.listen()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        host, port = socket.getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()
        socket.close()


@pytest.fixture
async def url(cell: JobsCell, replica: Replica, config: ClusterConfig) -> AsyncIterator[str]:
    """The gateway on a real socket, on the test's own loop."""
    app: FastAPI = app_of(cell, config, results=cell.results)
    settings = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server, socket = QuickServer(settings), settings.bind_socket()
    serving = asyncio.create_task(server.serve([socket]))
    host, port = socket.getsockname()
    yield f"http://{host}:{port}"
    server.should_exit = server.force_exit = True
    await serving


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", timeout=60) as one:
        yield one


async def make(replica: Replica, *, fails: bool = False) -> None:
    """Make the next image step by step, and show what is to be shown."""
    for _ in range(1000):
        if await replica.poll():
            break
    [lease] = replica.leases.values()
    request = lease.request
    for index, steps in enumerate(preview_steps(request.num_steps, request.output.num_previews)):
        replica.steps_done = steps
        await replica.poll()
        await replica.show(lease, index, f"preview {index}".encode())
        await asyncio.sleep(0.3)
    await (replica.fail(lease) if fails else replica.finish(lease, b"the image"))
