"""A service in a thread of this process, reached over HTTP: all that needs no processes to kill."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from ray_cluster.cell.local import LocalCell
from ray_cluster.config.loading import load_config
from tests.e2e.service import document, free_ports

PATIENCE_S = 300.0


class LocalService:
    """One local cell behind a socket, with the configuration of a :class:`Service`.

    Args:
        overrides: sections of the configuration that replace the test's own.
    """

    def __init__(self, folder: Path, **overrides: Any) -> None:
        (self.lora_port,) = free_ports(1)
        self.folder = folder
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = int(self._listener.getsockname()[1])
        content = document(folder, self._port, self.lora_port) | overrides
        # tests wait for it; no process of others makes a fetch late
        content["loras"]["fetch_timeout_s"] = 3.0
        self._config = load_config(content)
        self._server: uvicorn.Server | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="local service")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until its models are loaded."""
        self._thread.start()
        assert self._started.wait(PATIENCE_S), "it does not start"
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop it, and break off what is connected."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self._error = error
        finally:
            self._started.set()

    async def _live(self) -> None:
        async with LocalCell(self._config) as cell:
            settings = uvicorn.Config(cell.app, log_level="critical", lifespan="off")
            self._server = uvicorn.Server(settings)
            self._started.set()
            with closing(self._listener):
                await self._server.serve([self._listener])


@contextmanager
def running_locally(folder: Path, **overrides: Any) -> Iterator[LocalService]:
    """A local service that runs within the block."""
    service = LocalService(folder, **overrides)
    service.start()
    try:
        yield service
    finally:
        service.stop()
