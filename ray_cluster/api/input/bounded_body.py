"""Bounds a request's body while it arrives, and what all bodies hold that are being read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request

from ray_cluster.api.access.auth import caller_of
from ray_cluster.api.errors import ApiError, unavailable
from ray_cluster.api.input.strict_json import parse_object
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.policies.admission.fair_share import fits

# what a client may go on sending after the limit: it reads the 413 only when it has sent all
DRAIN_FACTOR = 16
_MAX_DRAINED_BYTES = 64 << 20
# bodies with images, of the largest allowed, that may be read at the same time
LARGEST_AT_ONCE = 2
# likewise without images; and what they may hold at least
_TEXTS_AT_ONCE = 64
_TEXT_BYTES = 64 << 20
# what a call takes beside what has arrived of its body
_LEAST_BYTES = 64 << 10
# each holds some pieces of a MiB on their way to the input store, and its texts
FORMS_AT_ONCE = 128
# above it, reading takes a thread: the event loop would stop for some milliseconds
_LARGE_BYTES = 1 << 20

Take = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """Bounds of a route's bodies.

    Attributes:
        max_s: seconds within which they must have arrived.
        time_key: the setting that ``max_s`` comes from, for messages.
    """

    max_bytes: int
    max_s: float
    time_key: str

    @classmethod
    def of_json(cls, limits: LimitsConfig) -> BodyLimit:
        """Return the limit of JSON bodies, which are held in memory."""
        return cls(limits.max_body_bytes, limits.max_body_s, "limits.max_body_s")

    @classmethod
    def of_uploads(cls, limits: LimitsConfig) -> BodyLimit:
        """Return the limit of forms with files, which are streamed."""
        return cls(limits.max_upload_bytes, limits.max_upload_s, "limits.max_upload_s")

    @property
    def drained_bytes(self) -> int:
        """How much of a body that is too large is read nevertheless."""
        return min(self.max_bytes * DRAIN_FACTOR, self.max_bytes + _MAX_DRAINED_BYTES)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Bound the time of a block; raises :class:`ApiError` 408 when it is over."""
        try:
            async with asyncio.timeout(self.max_s):
                yield
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body has not arrived within the {self.max_s:g} s allowed ({self.time_key}); "
                "send it faster.",
                code="body_too_slow",
                # the rest of it would be taken for the next call
                headers={"Connection": "close"},
            ) from None


class _Pot:
    """Something bounded that clients hold; see
    :func:`~ray_cluster.policies.admission.fair_share.fits`."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._held: Counter[str] = Counter()

    @contextmanager
    def share(self, client: str, most: int, least: int) -> Iterator[Take]:
        """Return a function that takes some of it, which is given back at the end of the block.

        Args:
            most: what there is for all.
            least: what is taken at once; the function takes nothing before it is used up.

        Raises:
            ApiError: 503, also from the function: the client holds its share already.
        """
        mine = asked = 0

        def take(num: int) -> None:
            nonlocal mine, asked
            asked += num
            more = max(0, asked - mine)
            wanted = self._held[client] + more
            others = [held for name, held in self._held.items() if name != client]
            if not fits(wanted, others, most):
                raise unavailable(
                    f"The calls of yours that this gateway is reading would hold {wanted} "
                    f"{self._unit}, of {most} that you share with {len(others)} other clients; let "
                    "some of them end, then try again. Images hold least as files of a form.",
                    "too_many_uploads",
                )
            mine += more
            self._held[client] = wanted

        take(least)
        asked = 0
        try:
            yield take
        finally:
            self._held[client] -= mine
            if not self._held[client]:
                del self._held[client]


class BodyMemory:
    """Bounds what the bodies hold that a gateway is reading, so that no client keeps others out.

    Bodies without images, those with images, and forms each have a bound of their own. Within each,
    a client has what the others leave, and of k clients always a k-th. Bytes count as they arrive;
    a body that has hardly begun counts as :data:`_LEAST_BYTES`, which bounds their number, too.
    """

    def __init__(self) -> None:
        self._texts, self._images, self._forms = _Pot("bytes"), _Pot("bytes"), _Pot("forms")

    @contextmanager
    def share(self, request: Request, limit: BodyLimit, limits: LimitsConfig) -> Iterator[Take]:
        """Return a function that takes bytes for a JSON body until the end of the block.

        Args:
            limit: of this body.

        Raises:
            ApiError: 503, also from the function: the client's bodies hold its share already.
        """
        is_small = 0 < announced_bytes(request) <= limits.max_body_bytes
        pot, most = self._images, LARGEST_AT_ONCE * limits.max_upload_bytes
        if is_small or limit.max_bytes <= limits.max_body_bytes:
            pot, most = self._texts, max(_TEXT_BYTES, _TEXTS_AT_ONCE * limits.max_body_bytes)
        least = min(_LEAST_BYTES, limit.max_bytes)
        with pot.share(caller_of(request), most, least) as take:
            yield take

    @contextmanager
    def form(self, request: Request) -> Iterator[None]:
        """Read a form in the block; raises :class:`ApiError` 503 where its client has too many."""
        with self._forms.share(caller_of(request), FORMS_AT_ONCE, 1):
            yield


async def read_object(
    request: Request,
    limit: BodyLimit,
    *,
    may_be_form: bool = False,
    take: Take | None = None,
) -> dict[str, Any]:
    """Return the request's JSON object.

    Args:
        may_be_form: whether the route takes forms as well, for the error of another content type.
        take: called with the length of each piece before it is kept; see :class:`BodyMemory`.

    Raises:
        ApiError: 415 for another content type, 413 for a body that is too large, 408 for one that
            has not arrived in time; or ``take`` raises it.
        InvalidRequest: see :func:`~ray_cluster.api.input.strict_json.parse_object`.
    """
    _check_content_type(request, may_be_form=may_be_form)
    body = bytearray()
    async with limit.in_time():
        async for chunk in bounded(request, limit):
            if take is not None:
                take(len(chunk))
            body += chunk
    if len(body) < _LARGE_BYTES:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


def _check_content_type(request: Request, *, may_be_form: bool) -> None:
    given = request.headers.get("content-type", "")
    media_type, _, parameters = given.partition(";")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip().strip('"').lower()
    coding = request.headers.get("content-encoding", "identity")
    if (
        media_type.strip().lower() != "application/json"
        or charset not in {"", "utf-8", "utf8"}
        or coding.lower() != "identity"
    ):
        instead = ", or a form with 'multipart/form-data'" if may_be_form else ""
        if media_type.strip().lower() == "multipart/form-data":
            instead = "; forms are taken by /v1/images/edits"
        elif media_type.strip().lower() == "application/x-www-form-urlencoded":
            instead += " (curl -d takes it from -H)"
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"The body must be plain UTF-8 JSON; given content type {given[:100]!r} with content "
            f"encoding {coding[:100]!r}. Send 'Content-Type: application/json'{instead}.",
            code="unsupported_media_type",
        )


async def bounded(request: Request, limit: BodyLimit) -> AsyncGenerator[bytes, None]:
    """Yield the request's body as it arrives.

    Raises:
        ApiError: 413 once it is larger than the limit; no byte above that is yielded.
    """
    # a body that is announced far too large is not even drained
    is_hopeless = announced_bytes(request) > limit.drained_bytes
    num_bytes = limit.max_bytes + 1 if is_hopeless else 0
    if num_bytes <= limit.max_bytes:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes <= limit.max_bytes:
                yield chunk
            elif num_bytes > limit.drained_bytes:
                break
    if num_bytes > limit.max_bytes:
        raise too_large(limit)


def announced_bytes(request: Request) -> int:
    """Return the size that a call says its body has; 0 if it does not say."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isdecimal() and len(announced) < 20 else 0


def too_large(limit: BodyLimit) -> ApiError:
    """Return the error for a body above a limit."""
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than the {limit.max_bytes} bytes allowed; send a smaller one.",
        code="body_too_large",
    )
