"""The real HTTP application over a real dispatcher's services, on a socket; replicas of nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.keys import ROLES
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.policies.steps.previews import preview_steps
from ray_cluster.protocol.leases import Lease
from ray_cluster.requests import ImageRequest
from tests.fakes import model_profile, registration, sent_images, settings_for
from tests.jobs.jobs_cell import JobsCell, Replica, until
from tests.keys import entry
from tests.quick_server import QuickServer

T = TypeVar("T")

KEYS = ["secret", "other"]
PATIENCE_S = 120.0


class Served:
    """A service whose dispatcher, gateway and replica live in a thread, and can be started again.

    The replica makes what it leases while ``is_working``, a step at each poll; else it stands
    still.

    Attributes:
        fails: whether the replica fails on what it leases.
        made: what it has made.
        num_losses: answers that will be lost with their connections.
        answered: the paths of the calls that were answered.
    """

    def __init__(self, folder: Path) -> None:
        self.is_working = True
        self.fails = False
        self.made: list[ImageRequest] = []
        self.num_losses = 0
        self.answered: list[str] = []
        self.cell: JobsCell
        self.replica: Replica
        self._folder = folder
        self._port = 0
        self._epoch = 0
        # each new client takes 20 ms; no connection outlives its call
        self._http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        self._server: QuickServer
        self._thread: threading.Thread
        self._loop: asyncio.AbstractEventLoop
        self._working: asyncio.Lock

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self, **cell_options: Any) -> None:
        """Start it; at the same port and over the same stores as the last time."""
        self._epoch += 1
        config = ClusterConfig.model_validate(
            {
                "http": {"api_keys": [entry("me", KEYS[0], *ROLES), *KEYS[1:]]},
                "pools": [{"name": "shapes", "model": "shapes-sd"}],
                "controlnets": [
                    {
                        "name": "edges",
                        "model": "shapes-sd-edges",
                        "bases": ["shapes"],
                        "description": "lines, white on black",
                    }
                ],
            }
        )
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        listener.listen()
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(config, listener, started, cell_options))
        )
        self._thread.start()
        assert started.wait(PATIENCE_S)

    def stop(self) -> None:
        """Stop it, and break off what is connected; its stores stay."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def create(self, prompt: str = "a red circle", **fields: Any) -> str:
        """Create a job of the first key; return its id."""
        body = {"prompt": prompt, "seed": 7, **fields}
        return str(self._call("POST", "/v1/jobs", json=body).json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", f"/v1/jobs/{job_id}").json()
        return found

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs of the first key."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/jobs").json()["data"]
        return found

    def only_job(self) -> dict[str, Any]:
        """Return the only job of the first key, once it is stored; it is queued before."""
        end_s = time.monotonic() + PATIENCE_S
        while not (found := self.jobs()):
            assert time.monotonic() < end_s, "no job was stored"
            time.sleep(0.01)
        (job,) = found
        return job

    def ended(self, job_id: str) -> dict[str, Any]:
        """Return a job once it has ended."""
        end_s = time.monotonic() + PATIENCE_S
        while (job := self.job(job_id))["finished"] is None:
            assert time.monotonic() < end_s, "the job does not end"
            time.sleep(0.02)
        return job

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        reply = self._http.request(method, self.url + path, headers=headers, **options)
        assert reply.is_success, reply.text
        return reply

    def pause(self) -> None:
        """Have the replica stand still, and no poll of it under way."""
        self.is_working = False
        self.do(self._paused())

    async def _paused(self) -> None:
        async with self._working:
            assert not self.is_working

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something on the service's loop."""
        self.do(until(condition, PATIENCE_S))

    async def _live(
        self,
        config: ClusterConfig,
        listener: socket.socket,
        started: threading.Event,
        cell_options: dict[str, Any],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        cell = JobsCell(self._folder, epoch=self._epoch, **cell_options)
        async with cell as self.cell, self._replica():
            # beside the settings, which have none
            cell.add_controlnets("edges")
            self._app = create_app(
                cell, settings_for(config), results=cell.results, images=sent_images()
            )
            settings = uvicorn.Config(
                self._front, log_level="critical", lifespan="off", interface="asgi3"
            )
            self._server = QuickServer(settings)
            started.set()
            with contextlib.closing(listener):
                await self._server.serve([listener])

    async def _front(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.num_losses:
            await self._app(scope, receive, send)
            self.answered.append(scope.get("path", ""))
            return
        self.num_losses -= 1

        async def lose(_: Message) -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            # until the server has seen it
            await asyncio.sleep(0.05)

        await self._app(scope, receive, lose)

    @contextlib.asynccontextmanager
    async def _replica(self) -> AsyncIterator[None]:
        self._working = asyncio.Lock()
        self.replica = Replica(self.cell, model="shapes")
        table = StepTable("ddim", 5.0, (FewerSteps(asked=10, balanced=6, fast=3),))
        profile = replace(model_profile("shapes"), max_px=128, fewer_steps=table)
        self.replica.epoch = await self.cell.dispatch.register(
            replace(registration("r", "shapes"), profile=profile)
        )
        work = asyncio.create_task(self._work())
        yield
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            async with self._working:
                await self._work_once()

    async def _work_once(self) -> None:
        if not self.is_working:
            return
        leases = await self.replica.poll()
        for lease in list(leases.values()):
            await self._show(lease)
            if self.replica.steps_done < lease.request.num_steps:
                continue
            if self.fails:
                await self.replica.fail(lease)
            else:
                await self.replica.finish(lease, f"image {lease.request.seed}".encode())
                self.made.append(lease.request)
        self.replica.steps_done = self.replica.steps_done + 1 if self.replica.leases else 0

    async def _show(self, lease: Lease) -> None:
        request = lease.request
        steps = preview_steps(request.num_steps, request.output.num_previews)
        if self.replica.steps_done in steps:
            index = steps.index(self.replica.steps_done)
            await self.replica.show(lease, index, f"preview {index}".encode())


@contextlib.contextmanager
def subprocess_of(*arguments: object, first: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process of its own; it is over after the block, whatever happens.

    Args:
        first: Python code that is run there before.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # as a shell starts what runs in its background; a command started so would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [
            *(sys.executable, "-c", f"{first}\nfrom ray_cluster.cli import main\nmain()"),
            *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
