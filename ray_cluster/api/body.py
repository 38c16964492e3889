"""Reads a JSON object from a request: bounded while it streams in, and strictly."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.requests import Request

from ray_cluster.api.errors import ApiError
from ray_cluster.errors import InvalidRequest

# what a client may go on sending after the limit: it reads the 413 only when it has sent all
DRAIN_FACTOR = 16


async def read_object(request: Request, max_bytes: int, max_s: float) -> dict[str, Any]:
    """Return the request's JSON object.

    Raises:
        ApiError: 415 for another content type, 413 for a body above ``max_bytes``, 408 for one that
            has not arrived within ``max_s``.
        InvalidRequest: not UTF-8, not JSON, not an object, nested too deeply, a name given twice.
    """
    _check_content_type(request)
    try:
        async with asyncio.timeout(max_s):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body has not arrived within the {max_s:g} s allowed (limits.max_body_s); send "
            "it faster.",
            code="body_too_slow",
            # the rest of it would be taken for the next call
            headers={"Connection": "close"},
        ) from None
    return parse_object(raw)


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    media_type, _, parameters = given.partition(";")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip().strip('"').lower()
    coding = request.headers.get("content-encoding", "identity")
    if (
        media_type.strip().lower() != "application/json"
        or charset not in {"", "utf-8", "utf8"}
        or coding.lower() != "identity"
    ):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"The body must be plain UTF-8 JSON; given content type {given[:100]!r} with content "
            f"encoding {coding[:100]!r}. Send 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    num_bytes = 0
    # a length that is announced far too large is not even drained
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20:
        num_bytes = 0 if int(announced) <= max_bytes * DRAIN_FACTOR else max_bytes + 1
    if num_bytes <= max_bytes:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes <= max_bytes:
                body += chunk
            elif num_bytes > max_bytes * DRAIN_FACTOR:
                break
    if num_bytes > max_bytes:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than the {max_bytes} bytes allowed; send a smaller one.",
            code="body_too_large",
        )
    return bytes(body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``; see :func:`read_object` for the errors."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise _not_json(f"it is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _not_json(f"{error.msg} at {where}") from error
    except RecursionError as error:
        raise _not_json("it is nested too deeply") from error
    except ValueError as error:
        # Python's own bound on the digits of one integer
        raise _not_json("it holds a number with thousands of digits") from error
    if not isinstance(value, dict):
        raise _not_json('it is not an object like {"prompt": "a red circle"}')
    return value


def _not_json(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The body cannot be read as a JSON object: {reason}.", code="invalid_json"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if not is_text(name):
            raise _not_json(f"the name {name[:100]!r} holds half a character (a lone surrogate)")
        if name in values:
            raise InvalidRequest(
                f"The parameter {name[:100]!r} is given more than once; give it once.",
                param=name[:100],
                code="duplicate_parameter",
            )
        values[name] = value
    return values


def _refuse_constant(name: str) -> float:
    raise _not_json(f"{name} is not a JSON number")


def is_text(value: str) -> bool:
    """Whether a string is made of whole characters; JSON's escapes can write half ones."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
