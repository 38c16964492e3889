"""``stream: true``: the previews of an image and the image itself, as OpenAI's events (SSE)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ray_cluster.api.errors import ApiError, from_unavailable
from ray_cluster.api.group import while_connected
from ray_cluster.api.reply import RepliedImage, append_base64, deadline_of, details_of
from ray_cluster.errors import Unavailable
from ray_cluster.protocol.outcomes import Preview
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)

PARTIAL = "image_generation.partial_image"
COMPLETED = "image_generation.completed"

Sights = AsyncGenerator[Preview | RepliedImage | None]
"""What there is to see of one image: previews, at last the image; None says that it still lasts."""

_KEEP_ALIVE = b": still there\n\n"
# OpenAI's clients want the field; nothing is counted in tokens here
_NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


class ImageStream(StreamingResponse):
    """Streams one image; whatever makes it is told when the client leaves.

    Args:
        request: the image that is made.
        sights: closed at the end, however that comes.
        clock: Unix time in seconds.
    """

    def __init__(self, request: ImageRequest, sights: Sights, clock: Callable[[], float]) -> None:
        super().__init__(
            _events(request, sights, clock),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._sights = sights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        # it would listen for the client's leaving, too, and not with every server
        streaming = super().__call__(scope, _silence, send)
        async with aclosing(self._sights):
            with suppress(ClientDisconnect):
                await while_connected(Request(scope, receive), streaming)


async def _silence() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def _events(
    request: ImageRequest, sights: Sights, clock: Callable[[], float]
) -> AsyncIterator[bytes]:
    # at once: clients learn that the stream is open
    yield _KEEP_ALIVE
    try:
        async for sight in sights:
            match sight:
                case None:
                    yield _KEEP_ALIVE
                case Preview():
                    yield await _partial(request, sight, int(clock()))
                case RepliedImage():
                    yield await _completed(sight, int(clock()))
    except ApiError as error:
        yield _failure(error)
    except Unavailable as error:
        logger.warning("the stream of %s ends: %s", request.request_id, error)
        yield _failure(from_unavailable(error))


async def _partial(request: ImageRequest, preview: Preview, created_s: int) -> bytes:
    head = _head(request, PARTIAL, created_s) | {
        "partial_image_index": preview.index,
        "step": preview.steps_done,
        "num_steps": preview.num_steps,
    }
    return await _event(PARTIAL, head, preview.data)


async def _completed(image: RepliedImage, created_s: int) -> bytes:
    head = _head(image.request, COMPLETED, created_s) | {
        "usage": _NO_USAGE,
        "model": image.request.model,
        "deadline": deadline_of([image]),
        **details_of(image),
    }
    return await _event(COMPLETED, head, image.data)


def _head(request: ImageRequest, name: str, created_s: int) -> dict[str, Any]:
    return {
        "type": name,
        "created_at": created_s,
        "background": "opaque",
        "output_format": request.output.image_format,
        "quality": "auto",
        "size": f"{request.width_px}x{request.height_px}",
    }


async def _event(name: str, head: dict[str, Any], image: bytes) -> bytes:
    start = f"event: {name}\ndata: {json.dumps(head)[:-1]}"
    parts = [start.encode(), b', "b64_json": "']
    await append_base64(parts, image)
    parts.append(b'"}\n\n')
    return b"".join(parts)


def _failure(error: ApiError) -> bytes:
    # OpenAI's clients raise for data with an "error" in it
    return b"event: error\ndata: " + bytes(error.response().body) + b"\n\n"
