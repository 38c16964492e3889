"""An HTTP server that ends when it is told to."""

from __future__ import annotations

import asyncio
import socket

import uvicorn


class QuickServer(uvicorn.Server):
    """The usual one looks ten times a second whether to end, and then waits for a tenth."""

    async def main_loop(self) -> None:
        """Serve until it is to end."""
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything; only if it is not to break off, wait for what is connected."""
        if not self.force_exit:
            await super().shutdown(sockets)
            return
        for one in (*self.servers, *(sockets or ())):
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0.01)
