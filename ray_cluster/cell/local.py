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
from ray_cluster.cell.kinds import build_skill
from ray_cluster.cell.worker import Worker
from ray_cluster.config.kinds import LORAS
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.config.slices import front_arguments, worker_arguments
from ray_cluster.imaging.detectors import Detectors
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.replica.group.processes import StartRank, start_child
from ray_cluster.replica.host import Host
from ray_cluster.replica.skill import Skill

_NODE = "127.0.0.1"


class LocalCell:
    """Runs on the event loop that it is entered on.

    Args:
        config: what a service would be started with; ports and reservations mean nothing here.
        file: watched for other settings; None if they stay.
        is_brief: whether it is there for a call of the user who runs it: no step is measured first,
            and LoRAs are read in threads, as they are as good as the model's own files.
        start_rank: starts a rank of a group.
        name: of the cell. One of another name, whose configuration has the same
            `dispatch.service`, takes over from this one once its workers are there.

    Attributes:
        app: the HTTP application.
        front: answers gateway and workers.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        file: SettingsFile | None = None,
        is_brief: bool = False,
        start_rank: StartRank = start_child,
        name: str = "local",
    ) -> None:
        self._config = config
        self._is_brief, self._start_rank = is_brief, start_rank
        self._name = name
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
            identity=Identity(self._name, time.time_ns()),
            file=self._file,
        )
        stack.push_async_callback(self.front.stop)
        await self.front.begin()
        settings = CurrentSettings()
        self._feed = SettingsFeed(self.front.client, settings)
        stack.callback(self._feed.stop)
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
            self._begin(await self._loaded(LORAS, LORAS), stack)
        for worker in config.workers:
            for number in range(worker.replicas):
                self._begin(await self._loaded(worker.name, f"{worker.name}-{number}"), stack)
        # not before: whoever stands by has none until its workers are there
        await self._feed.start()

    def _begin(self, skill: Skill, stack: AsyncExitStack) -> None:
        worker = Worker(skill)
        worker.start()
        stack.push_async_callback(worker.drain)
        self._workers.append(worker)

    async def _loaded(self, name: str, replica_id: str) -> Skill:
        """Return the skill of a worker; it loads in a thread, and calls are answered meanwhile."""
        settings = await self.front.link.pool_settings(name)
        arguments, link = worker_arguments(self._config, name), self.front.link
        host = Host(
            replica_id,
            _NODE,
            link,
            self._coder,
            is_brief=self._is_brief,
            start_rank=self._start_rank,
            making=self._making,
        )

        def load() -> Skill:
            with self._making:
                return build_skill(arguments, settings, host)

        return await _in_daemon(load)

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
