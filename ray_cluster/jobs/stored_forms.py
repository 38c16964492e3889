"""How requests, images, errors and registrations stand in the store: as versioned JSON."""

from __future__ import annotations

from typing import Any, TypeVar

from ray_cluster.codec.values import TextCodec, is_versioned, plain_of
from ray_cluster.protocol.jobs import StoredImage
from ray_cluster.protocol.leases import Registration
from ray_cluster.requests import Failure, ImageRequest

T = TypeVar("T")

Requests = tuple[ImageRequest, ...]
Images = tuple[StoredImage | None, ...]

REQUESTS: TextCodec[Requests] = TextCodec(Requests)
IMAGES: TextCodec[Images] = TextCodec(Images)
ERROR: TextCodec[Failure | None] = TextCodec(Failure | None)
REGISTRATION: TextCodec[Registration] = TextCodec(Registration)


def stored(codec: TextCodec[T], text: str) -> T:
    """Return what a column holds, also where a version before the codec wrote it.

    Raises:
        CodecError: it is damaged, or of a later version.
    """
    plain = plain_of(text)
    return codec.of_plain(plain["value"] if is_versioned(plain) else _renewed(plain))


def _renewed(plain: Any) -> Any:
    """Return plain values with today's fields."""
    if isinstance(plain, list):
        return [_renewed(one) for one in plain]
    if isinstance(plain, dict):
        # a request's terms say the same
        is_request = "prompt" in plain
        return {key: one for key, one in plain.items() if not is_request or key != "fewest_steps"}
    return plain
