"""``stream: true``: the previews of an image and the image itself, as OpenAI's events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ray_cluster.api.errors import ApiError, from_unavailable
from ray_cluster.api.input.call_reader import EventKind
from ray_cluster.api.output.event_streams import KEEP_ALIVE
from ray_cluster.api.output.reply_writer import (
    RepliedImage,
    append_base64,
    deadline_of,
    details_of,
    quality_of,
    size_text,
)
from ray_cluster.errors import Unavailable
from ray_cluster.protocol.outcomes import Preview
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)

Updates = AsyncGenerator[Preview | RepliedImage | None]
"""The previews of one image, at last the image; None says that it is still being made."""

# OpenAI's clients want the field; nothing is counted in tokens here
_NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


async def image_events(
    request: ImageRequest, kind: EventKind, updates: Updates, clock: Callable[[], float]
) -> AsyncGenerator[bytes]:
    """Yield the events of an image, first nothing once it is admitted; errors end them.

    Args:
        kind: what they are called.
        clock: Unix time in seconds.

    Raises:
        ApiError, Unavailable: before it is admitted.
    """
    async with aclosing(updates):
        await anext(updates)
        yield b""
        try:
            async for update in updates:
                yield await _event(request, kind, update, int(clock()))
        except ApiError as error:
            yield _failure(error)
        except Unavailable as error:
            logger.warning("the stream of %s ends: %s", request.request_id, error)
            yield _failure(from_unavailable(error))


async def _event(
    request: ImageRequest,
    kind: EventKind,
    update: Preview | RepliedImage | None,
    created_s: int,
) -> bytes:
    if update is None:
        return KEEP_ALIVE
    if isinstance(update, Preview):
        name = f"{kind}.partial_image"
        more: dict[str, Any] = {
            "partial_image_index": update.index,
            "step": update.steps_done,
            "num_steps": update.num_steps,
        }
    else:
        name = f"{kind}.completed"
        more = {
            "usage": _NO_USAGE,
            "model": update.request.called_model,
            "deadline": deadline_of([update]),
            **details_of(update),
        }
    head = {
        "type": name,
        "created_at": created_s,
        "background": "opaque",
        "output_format": request.output.image_format,
        "quality": quality_of(request),
        "size": size_text(request),
        **more,
    }
    # the image is spliced in: see the reply's module
    parts = [f"event: {name}\ndata: {json.dumps(head)[:-1]}".encode(), b', "b64_json": "']
    await append_base64(parts, update.data)
    parts.append(b'"}\n\n')
    return b"".join(parts)


def _failure(error: ApiError) -> bytes:
    # OpenAI's clients raise for data with an "error" in it
    return f"event: error\ndata: {error.body()}\n\n".encode()
