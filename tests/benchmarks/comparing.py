"""Small comparisons, and a foreign server that waits for calls."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from PIL import Image

from benchmarks.serving.compare.settings import Settings
from benchmarks.serving.compare.traces import Trace, draw_traces

SETTINGS = Settings(
    sizes=((64, 64), (128, 64)), steps=(10, 20), num_traces=2, num_requests=40, loads=(0.5, 1.0)
)
ALONE_S = {shape.name: 0.01 * shape.num_steps * shape.width_px / 64 for shape in SETTINGS.shapes}


def traces(settings: Settings = SETTINGS, rate_per_s: float = 2.0) -> list[Trace]:
    return draw_traces(settings, ["a circle", "a square"], rate_per_s=rate_per_s, alone_s=ALONE_S)


def image_reply(width: int = 64, height: int = 64, num_steps: int = 10) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    image = {
        "b64_json": base64.b64encode(buffer.getvalue()).decode(),
        "num_inference_steps": num_steps,
    }
    return json.dumps({"data": [image]}).encode()


@asynccontextmanager
async def gated_server(num_calls: int = 1, *, cuts_off: bool = False) -> AsyncIterator[str]:
    """An HTTP server that answers once so many calls have come, or ends without; yields its URL."""
    gate, num_seen = asyncio.Event(), 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_seen
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                num_seen += 1
                if num_seen >= num_calls:
                    gate.set()
                await gate.wait()
                if cuts_off:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        gate.set()
