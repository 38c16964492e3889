"""A whole cell in one process: its front, one gateway, and all workers, without Ray.

Workers are the same as in a cluster, and talk to the front by the same calls. As several of them
compute in threads of one process and share its GIL, it shows what a service does, not how fast.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any

from fastapi import FastAPI

from ray_cluster.api.app import Surroundings, create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.settings import CurrentSettings, SettingsFeed
from ray_cluster.cell.front import Front, Identity, Stores
from ray_cluster.cell.worker import Worker
from ray_cluster.config.arguments import (
    controlnet_arguments,
    front_arguments,
    lora_store_arguments,
    scorer_arguments,
    worker_arguments,
)
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import DiscriminatorConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.imaging.detectors import Detectors
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.process.gc_freeze import uncollected
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.skill import Skill

_NODE = "127.0.0.1"
_CELL = "local"

WorkerConfig = PoolConfig | DiscriminatorConfig | ControlNetConfig


class LocalCell:
    """Runs on the event loop that it is entered on.

    Args:
        config: what a service would be started with; ports and reservations mean nothing here.
        file: watched for other settings; None if they stay.
        is_brief: whether it is there for a call of the user who runs it: no step is measured first,
            and LoRAs are read in threads, as they are as good as the model's own files.

    Attributes:
        app: the HTTP application.
        front: answers gateway and workers.
    """

    def __init__(
        self, config: ClusterConfig, *, file: SettingsFile | None = None, is_brief: bool = False
    ) -> None:
        self._config = config
        self._is_brief = is_brief
        self._file = file
        self._workers: list[Worker] = []
        # models are made one after the other: that changes torch for the whole process meanwhile
        self._making = threading.Lock()
        # the images in flight bound what waits
        self._coder = ImageCoder(max_waiting_bytes=None)
        self._checks = ImageCoder()
        self.front: Front
        self.app: FastAPI

    async def __aenter__(self) -> LocalCell:
        async with AsyncExitStack() as stack:
            # all of it ends, whatever fails of its end
            stack.callback(self._coder.close)
            stack.callback(self._checks.close)
            await self._start(stack)
            self._ends = stack.pop_all()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self._ends.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self._config
        arguments = front_arguments(config, None if self._file is None else self._file.path)
        stores = await asyncio.to_thread(Stores.open, arguments.storage)
        self.front = Front(
            arguments,
            config,
            stores,
            identity=Identity(_CELL, time.time_ns()),
            file=self._file,
        )
        stack.push_async_callback(self.front.stop)
        await self.front.start()
        settings = CurrentSettings()
        self._feed = SettingsFeed(self.front.client, settings)
        stack.callback(self._feed.stop)
        await self._feed.start()
        self.app = create_app(
            self.front.client,
            settings,
            results=stores.results,
            images=SentImages(
                stores.inputs, self._checks, Detectors(config.preprocessors.folder or "")
            ),
            around=Surroundings(),
        )
        if config.loras.num_stores:
            self._begin(self._lora_store(), stack)
        for worker in config.workers:
            for number in range(worker.replicas):
                self._begin(await self._loaded(worker, f"{worker.name}-{number}"), stack)

    def _begin(self, skill: Skill, stack: AsyncExitStack) -> None:
        worker = Worker(skill)
        worker.start()
        stack.push_async_callback(worker.drain)
        self._workers.append(worker)

    def _lora_store(self) -> Skill:
        # not above: who only wants a front needs none of it
        from ray_cluster.replica.lora_store.folder import LoraFolder
        from ray_cluster.replica.lora_store.processes import LoraThreads
        from ray_cluster.replica.lora_store.skill import LoraStoreSkill, store_registration

        return LoraStoreSkill(
            store_registration("loras", _NODE),
            LoraFolder(
                lora_store_arguments(self._config).loras,
                workers=LoraThreads(self._making) if self._is_brief else None,
            ),
            link=self.front.link,
            clock=time.monotonic,
        )

    async def _loaded(self, worker: WorkerConfig, replica_id: str) -> Skill:
        """Return the skill of a worker; it loads in a thread, and calls are answered meanwhile."""
        settings = await self.front.link.pool_settings(worker.name)
        return await _in_daemon(lambda: self._alone(worker, replica_id, settings))

    def _alone(
        self, worker: WorkerConfig, replica_id: str, settings: WorkerSettings | None
    ) -> Skill:
        with self._making:
            return self._load(worker, replica_id, settings)

    def _load(
        self, worker: WorkerConfig, replica_id: str, settings: WorkerSettings | None
    ) -> Skill:
        with uncollected():
            # not above: torch and the model libraries take seconds
            from ray_cluster.replica.controlnet.builder import build_controlnet
            from ray_cluster.replica.denoise.builder import build_denoiser
            from ray_cluster.replica.score.builder import build_scorer
        config, link, clock = self._config, self.front.link, time.monotonic
        if isinstance(worker, PoolConfig):
            return build_denoiser(
                worker_arguments(config, worker.name),
                settings,
                replica_id=replica_id,
                node=_NODE,
                coder=self._coder,
                link=link,
                clock=clock,
                is_measured=not self._is_brief,
            )
        if isinstance(worker, DiscriminatorConfig):
            return build_scorer(
                scorer_arguments(config, worker.name),
                settings,
                replica_id=replica_id,
                node=_NODE,
                link=link,
                clock=clock,
            )
        return build_controlnet(
            controlnet_arguments(config, worker.name),
            settings,
            replica_id=replica_id,
            node=_NODE,
            link=link,
            clock=clock,
        )

    def check_alive(self) -> None:
        """Raise RuntimeError when something of it has died."""
        self.front.check_health()
        self._feed.check_alive()
        for worker in self._workers:
            worker.check_alive()


async def _in_daemon(work: Callable[[], Skill]) -> Skill:
    """Do something in a thread that nobody waits for when the process ends: a model that loads
    cannot be told to stop."""
    loop, done = asyncio.get_running_loop(), asyncio.Future[Skill]()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            _tell(done.set_exception, error)
        else:
            _tell(done.set_result, found)

    def _tell(say: Callable[[Any], None], what: Any) -> None:
        def once() -> None:
            if not done.done():
                say(what)

        # the loop may be gone by then
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(once)

    threading.Thread(target=run, name="model that loads", daemon=True).start()
    return await done
