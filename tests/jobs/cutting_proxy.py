"""A TCP proxy to a PostgreSQL server that cuts connections at a COMMIT: before or after it.

It runs on the test's event loop: whatever calls the store there has to do it in a thread.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

Cut = Literal["before", "after"]

# a simple query, as psycopg sends it
_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
_READ_BYTES = 1 << 16


class CuttingProxy:
    """Passes bytes on, until it is to cut.

    Attributes:
        cuts: what to do at the next commits of something written, one after the other.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.cuts: list[Cut] = []
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        its_reader, its_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            with suppress(ConnectionError):
                answers = asyncio.create_task(_pass_on(its_reader, writer))
                has_written = False
                while data := await reader.read(_READ_BYTES):
                    has_written = has_written or b"INSERT" in data or b"UPDATE jobs" in data
                    is_commit = has_written and _COMMIT in data
                    has_written = has_written and not is_commit
                    if is_commit and self.cuts:
                        if self.cuts.pop(0) == "after":
                            answers.cancel()
                            its_writer.write(data)
                            # the server's answer, which nobody gets
                            await its_reader.read(1)
                        return
                    its_writer.write(data)
                    await its_writer.drain()
        finally:
            answers.cancel()
            writer.close()
            its_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
