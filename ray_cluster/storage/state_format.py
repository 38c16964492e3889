"""How a request's state stands in a store: a checksum, a header without torch, then tensors."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from ray_cluster.codec.values import TextCodec
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.requests import ImageRequest

_MAGIC = b"ray-cluster request state 4\n"
_CHECKSUM_BYTES = 4
_START = len(_MAGIC) + _CHECKSUM_BYTES
# more than a header with prompts of the usual bound takes
HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StateHeader:
    """What a state says of itself beside its tensors.

    Attributes:
        step_index: denoising steps done.
        model_digest: of the model that they were done with; on another one the image starts over.
        queued_s: seconds before the first replica had it; the other times likewise are those of
            :class:`ray_cluster.engine.step.state.RequestState`.
        full_step: index of the last step that was computed whole, of a request on a reuse schedule.
        num_reused: steps in which it has taken anything from an earlier one.
        lacks_loras: whether its LoRAs are still to come, after its request's first steps.
        steps_by_degree: degrees of a group's sets with the steps that were done on them.
    """

    request: ImageRequest
    step_index: int
    model_digest: str = ""
    queued_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    reuse: ReuseSchedule | None = None
    full_step: int | None = None
    num_reused: int = 0
    lacks_loras: bool = False
    steps_by_degree: tuple[tuple[int, int], ...] = ()


_HEADER: TextCodec[StateHeader] = TextCodec(StateHeader)


def header_text(header: StateHeader) -> str:
    """Return a header as it stands in the metadata of the state's tensors."""
    return _HEADER.encode(header)


def wrapped(body: bytes) -> bytes:
    """Return safetensors with a mark and a checksum before them."""
    return _MAGIC + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def unwrapped(data: bytes) -> bytes:
    """Return the safetensors within, once nothing of them is missing or changed.

    Raises:
        ValueError: there is.
    """
    _check_mark(data)
    body = data[_START:]
    given = int.from_bytes(data[len(_MAGIC) : _START], "little")
    if len(data) < _START or zlib.crc32(body) != given:
        raise ValueError(f"request state is damaged: {len(data)} bytes with a wrong checksum")
    return body


def header_of(head: bytes) -> StateHeader:
    """Return the header of a state, given all of its bytes or the first ``HEAD_BYTES``.

    Raises:
        ValueError: it is no state of this version, or its header is longer than that.
    """
    _check_mark(head)
    body = head[_START:]
    length = int.from_bytes(body[:8], "little")
    try:
        return _HEADER.decode(json.loads(body[8 : 8 + length])["__metadata__"]["state"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not a request state of this version: {error!r}") from error


def _check_mark(data: bytes) -> None:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"not a request state: {len(data)} bytes that do not begin with {_MAGIC!r}"
        )
