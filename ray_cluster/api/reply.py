"""Writes the reply of a finished call.

Base64 holds the GIL (a thread would stop the event loop just as long): 2.3 ms per MB on a laptop
core, and ``json.dumps`` of its result another 6. So images are coded in slices, with the loop
running in between, and spliced into the JSON: base64 needs no escapes.
"""

from __future__ import annotations

import asyncio
import binascii
import json
from collections.abc import Sequence
from typing import Any

from ray_cluster.leases import Completed
from ray_cluster.requests import ImageRequest

# a multiple of 3, so that the codes of slices join; about 1 ms of work
SLICE_BYTES = 3 * 128 * 1024


async def write_reply(
    requests: Sequence[ImageRequest], completed: Sequence[Completed], created_s: int
) -> bytes:
    """Return the JSON of :class:`~ray_cluster.api.schema.ImagesResponse`."""
    first = requests[0]
    elapsed_s = max(item.elapsed_s for item in completed)
    head = {
        "created": created_s,
        "model": first.model,
        "background": "opaque",
        "output_format": first.output.image_format,
        "size": f"{first.width_px}x{first.height_px}",
        "deadline": {
            "slo_s": completed[0].slo_s,
            "elapsed_s": elapsed_s,
            "met": all(item.deadline_met for item in completed),
        },
    }
    parts = [json.dumps(head).encode()[:-1], b', "data": [']
    for index, (request, item) in enumerate(zip(requests, completed, strict=True)):
        parts.append(b'{"b64_json": "' if index == 0 else b', {"b64_json": "')
        for start in range(0, len(item.result.data), SLICE_BYTES):
            piece = memoryview(item.result.data)[start : start + SLICE_BYTES]
            parts.append(binascii.b2a_base64(piece, newline=False))
            if len(piece) == SLICE_BYTES:
                await asyncio.sleep(0)
        parts.append(b'", ' + json.dumps(_details(request, item)).encode()[1:])
    parts.append(b"]}")
    return b"".join(parts)


def _details(request: ImageRequest, item: Completed) -> dict[str, Any]:
    timing = {**item.result.timing.as_dict(), "total_s": item.elapsed_s}
    return {
        "seed": request.seed,
        "timing": {name: round(seconds, 6) for name, seconds in timing.items()},
    }
