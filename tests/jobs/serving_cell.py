"""A cell as a process of its own: ``python -m tests.jobs.serving_cell NAME CONFIG PORT``.

It ends on SIGTERM as a pod does: calls that it has begun are served first, for a while.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from ray_cluster.cell.local import LocalCell
from ray_cluster.config.loading import load_config


class Server(uvicorn.Server):
    """Leaves signals to its process, whose cell ends after it."""

    def end(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(name: str, path: Path, port: int) -> None:
    """Serve until SIGTERM."""
    torch.set_num_threads(1)
    async with LocalCell(load_config(path), name=name) as cell:
        config = uvicorn.Config(
            cell.app, port=port, log_level="warning", timeout_graceful_shutdown=20
        )
        server = Server(config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
        await server.serve()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
