"""Images of a cell in this process, asked for as those of a running service are."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from ray_cluster.cell.local import LocalCell
from ray_cluster.cli.images.call_check import CheckedCall
from ray_cluster.cli.images.image_files import GeneratedImages, GenerateFailed, PreviewFiles
from ray_cluster.cli.images.lora_options import LocalLora
from ray_cluster.cli.progress import step_progress
from ray_cluster.cli.remote.remote_jobs import generate_there
from ray_cluster.cli.remote.remote_service import RemoteService
from ray_cluster.cli.service.signals import StopSignals
from ray_cluster.config.kinds import KINDS
from ray_cluster.config.loading import ClusterConfig, section_of
from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.errors import LAST_STAGES
from ray_cluster.models.sources.lora_sources import config_beside
from ray_cluster.protocol.loras import Lora

_URL = "http://this-process"
# a look at a job of this process costs little
_POLL_S = 0.03
# between two looks whether all of the cell lives
_CHECK_S = 1.0
# bounds on what one client may ask of a service: here it is its own
_UNBOUNDED = {"max_queue_s": 1e9, "max_queued_images": 10_000} | dict.fromkeys(
    ("max_body_bytes", "max_upload_bytes", "max_stored_bytes_per_client"), 1 << 40
)
_ANY_LORA = dict.fromkeys(("max_file_bytes", "max_disk_bytes"), 1 << 40)


def generate_here(
    call: CheckedCall,
    body: Mapping[str, Any],
    config: ClusterConfig,
    previews: PreviewFiles,
    console: Console,
) -> GeneratedImages:
    """Load the models of one call in this process, and make its images.

    Args:
        body: the call as a service would get it, with its images.

    Raises:
        InvalidRequest: a parameter does not suit the model.
        ConfigError, ModelUnsupported, MemoryRefused: a model cannot be loaded.
        RayClusterError: a model failed on the request.
    """
    logging.getLogger("ray_cluster").setLevel(logging.CRITICAL)
    names = [one.name for one in call.pools]
    with (
        StopSignals(with_hangup=True) as signals,
        tempfile.TemporaryDirectory(prefix="ray-cluster-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        # the folder goes, whatever ends this
        signals.arm()
        small = _config_of(call, body, config, Path(folder))
        with step_progress(console) as progress:
            progress.add_task(f"loading {', '.join(names)}", total=None)
            client = stack.enter_context(_served(small, call.loras))
        images = generate_there(client, body, math.inf, previews, console, _POLL_S)
    # that of the configuration is none of the caller's
    return images if "slo_s" in body else replace(images, deadline_met=None)


def _config_of(
    call: CheckedCall, body: Mapping[str, Any], config: ClusterConfig, folder: Path
) -> ClusterConfig:
    """Return a configuration of nothing but what a call needs."""
    cascades = [one for one in config.cascades if one.name == body.get("model")]
    scorers = {one.discriminator for one in cascades}
    # of a link, both ends: a hub's cache names only its links
    files = {file for one in call.loras for file in (one.path, config_beside(one.path))}
    ends = {end for one in files for end in (one.absolute(), one.resolve())}
    loras = {
        **_ANY_LORA,
        "folder": str(folder / "loras"),
        "registered": (),
        "num_stores": int(bool(call.loras)),
        "sources": tuple(map(str, ends)),
    }
    return config.model_copy(
        update={
            "http": config.http.model_copy(update={"api_keys": (), "open": True}),
            "limits": config.limits.model_copy(update=_UNBOUNDED),
            "storage": StorageConfig().resolved(folder),
            "loras": config.loras.model_copy(update=loras),
            "pools": tuple(_alone(one, config) for one in call.pools),
            "discriminators": tuple(
                one.model_copy(update={"replicas": 1})
                for one in config.discriminators
                if one.name in scorers
            ),
            "cascades": tuple(cascades),
            "controlnets": call.controlnets,
            **dict(_last_stages(body, config)),
        }
    )


def _last_stages(
    body: Mapping[str, Any], config: ClusterConfig
) -> Iterator[tuple[str, tuple[WorkerConfig, ...]]]:
    """Yield a worker of each last stage that is asked for, and none of the others, by section."""
    for kind in LAST_STAGES:
        row = KINDS[kind]
        given = getattr(config, row.section) or (section_of(row)(name=row.title),)
        yield row.section, (given[0].model_copy(update={"replicas": 1}),) if kind in body else ()


def _alone(pool: PoolConfig, config: ClusterConfig) -> PoolConfig:
    """Return a pool of one replica; on the GPU, if no configuration says where it is to be."""
    given: dict[str, Any] = {"replicas": 1}
    if pool not in config.pools and torch.cuda.is_available():
        given |= {"device": "cuda", "dtype": "float16", "num_gpus": 1.0}
    return pool.model_copy(update=given)


@contextmanager
def _served(config: ClusterConfig, loras: Sequence[LocalLora]) -> Iterator[RemoteService]:
    """Run a cell in a thread, and return its client once its models are loaded."""
    life = _Life(config, loras)
    # a model that loads cannot be told to stop: Ctrl-C leaves it behind
    thread = threading.Thread(target=life.run, name="cell", daemon=True)
    thread.start()
    app, loop = life.started.result()
    try:
        with RemoteService(_URL, None, transport=_ToApp(app, loop, life)) as service:
            yield service
    finally:
        # unless it has ended by itself
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(life.over.set)
        thread.join()


class _Life:
    """A cell from its start to its end, on an event loop of its own.

    Attributes:
        failure: why it has ended, once it has.
    """

    def __init__(self, config: ClusterConfig, loras: Sequence[LocalLora]) -> None:
        self._config = config
        self._loras = loras
        self.started: Future[tuple[Any, asyncio.AbstractEventLoop]] = Future()
        self.over = asyncio.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self.failure = error
            if not self.started.done():
                self.started.set_exception(error)

    async def _live(self) -> None:
        async with LocalCell(self._config, is_brief=True) as cell:
            base = self._config.pools[-1].model_name
            for one in self._loras:
                # with the name of the call, which may be a path
                lora_id, source = secrets.token_hex(8), str(one.path.absolute())
                known = Lora(lora_id, one.name, base, source, added_s=time.time())
                cell.front.dispatch.loras.add(known)
            self.started.set_result((cell.app, asyncio.get_running_loop()))
            while not self.over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), _CHECK_S)
                cell.check_alive()


class _ToApp(httpx.BaseTransport):
    """Sends calls to an application on the event loop of another thread, while that lives."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop, life: _Life) -> None:
        self._inner = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._loop = loop
        self._life = life

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._check()
        call = self._answer(request, request.read())
        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        while True:
            try:
                return answer.result(_CHECK_S)
            except TimeoutError:
                if answer.done():
                    raise
                self._check()

    def _check(self) -> None:
        if self._life.failure is not None:
            raise GenerateFailed(f"The model failed: {self._life.failure}") from self._life.failure

    async def _answer(self, request: httpx.Request, content: bytes) -> httpx.Response:
        sent = httpx.Request(request.method, request.url, headers=request.headers, content=content)
        reply = await self._inner.handle_async_request(sent)
        return httpx.Response(reply.status_code, headers=reply.headers, content=await reply.aread())
