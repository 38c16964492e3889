"""Calls of any method, path, query, headers and body: near ones that nearly work, and nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Scope

from ray_cluster.api.advice import REFUSED
from ray_cluster.api.input.schemas import ImageEditRequest

POSTED = (
    *("/v1/images/generations", "/v1/images/estimate", "/v1/jobs"),
    *("/v1/images/edits", "/v1/images/variations"),
    *("/v1/preprocess", "/v1/files"),
)
PATHS = (
    *POSTED,
    *("/v1/jobs/{job}", "/v1/jobs/{job}/events", "/v1/files/{file}"),
    *("/v1/controlnets", "/v1/files/file-0"),
    *("/v1/models", "/v1/models/{model}", "/healthz", "/readyz", "/metrics"),
    *("/docs", "/openapi.json", "/v1/images/upscales", "/v1/chat/completions", "/", "", "*"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get")
NAMES = (
    *ImageEditRequest.model_fields,
    *REFUSED,
    "image",
    "mask",
    "steps",
    "loras",
    "preprocess",
    "purpose",
    "",
    "\ud800",
    "a" * 200,
)
TEXTS = (
    *("auto", "64x64", "96x32", "64X64", "png", "jpeg", "webp", "url", "b64_json", "shapes"),
    *("late", "lcm", "exact", "balanced", "opaque", "transparent", "hd", "true", "7", "nan"),
    *("", " ", "\0", "\ud800", "\U0001f642" * 30, "red " * 40, "../../etc/passwd", "x" * 5000),
)
NUMBERS = (0, 1, 2, 3, 7, -1, 64, 1.5, -0.0, 1e308, 2**31, 2**63 - 1, 2**63, 10**40, True, False)
RAW_BODIES = (
    *(b"", b"null", b"[]", b"{", b'{"prompt": "a"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 3000),
    *(b'{"prompt": NaN}', b'{"a": 1, "a": 2}', b'{"seed": ' + b"9" * 3000 + b"}", b"x" * 9000),
    *(b"prompt=a", b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n'),
)
HEADERS: dict[str, tuple[str, ...]] = {
    "content-type": (
        *("application/json", "application/json; charset=utf-16", "text/plain", ""),
        *("multipart/form-data; boundary=x", "multipart/form-data", "application/json;;=\xff"),
    ),
    "content-length": ("0", "1", "-1", "9" * 30, "x", "\xb2"),
    "content-encoding": ("gzip", "identity", "\xff"),
    "transfer-encoding": ("chunked", "gzip, chunked"),
    "accept": ("*/*", "text/event-stream", "image/png;q=x", "\xff"),
    "accept-encoding": ("gzip", "*;q=0"),
    "authorization": ("Bearer x", "Bearer", "Basic x", "bearer \xff", ""),
    "api-key": ("x",),
    "idempotency-key": ("a", "b", "c", "", "x" * 256, "\xe9", "a b\t"),
    "last-event-id": ("queued", "running.3", "running." + "9" * 5000, "\xff", ""),
    "x-request-id": ("mine", "x" * 200, "\xff", "a\r\nb: c"),
    "origin": ("https://app.example.com", "null", "https://evil.com", "\xff", ""),
    "access-control-request-method": ("POST", "GET", "NO", ""),
    "access-control-request-headers": ("authorization", "x" * 500, "\xff", ","),
    "access-control-request-private-network": ("true",),
    "host": ("example.com", "", "a:b:c", "[::1", "exa mple", "\xff", "x:99999", "a/b@c?d#e"),
    "forwarded": ("for=1.2.3.4;host=x;proto=https", ";;,,=", 'for="[::1"', "host=\xff", '"'),
    "x-forwarded-for": ("1.2.3.4", "a, b,, c", "[::1]:80", "127.0.0.1, 127.0.0.1", "\xff"),
    "x-forwarded-host": ("example.com", "a b", "[::1", "x:y:z", "\xff", ",", "["),
    "x-forwarded-proto": ("https", "ftp", "https, http", "\xff"),
    "x-forwarded-port": ("443", "0", "-1", "\xb2", "9" * 5000),
    "x-forwarded-prefix": ("/a", "/v1", "//x", "a", "/%00", "/../..", "\xff"),
    "if-none-match": ("*", '"x"', "\xff"),
    "range": ("bytes=0-", "bytes=5-1", "x"),
    "expect": ("100-continue",),
    "upgrade": ("websocket", "h2c"),
    "connection": ("close", "upgrade", "x"),
    "cookie": ("a=b", ";;;", "\xff"),
    "x-http-method-override": ("DELETE",),
    "x-request-timeout-seconds": ("0.001", "\xff"),
    "x-request-disconnect-disabled": ("?1", "\xff"),
    "x-session-id": ("\xff",),
    "serve_multiplexed_model_id": ("a", "\xff"),
    "traceparent": ("\xff",),
    "x-api-\xe9": ("a",),
    "": ("",),
    "x-long": ("x" * 40_000,),
}
QUERIES = (
    *("", "limit=1", "limit=0", "limit=x", "limit=1&limit=2", "state=queued", "state=x", "after="),
    *("after=%00", "after=job-%ff", "after=" + "a" * 101, "%", "%zz=%", "a[]=1&=&&", "stream=true"),
    *("\xff", "limit=" + "9" * 5000, "after=job-" + "0" * 32, ";", "limit=%D9%A3"),
)
# of a connection; what is wrong with them has tests of its own
_FRAMING = ("content-length", "transfer-encoding", "expect", "connection", "upgrade", "")
SOME_ID = ("job-" + "0" * 32, "img-" + "0" * 32 + ".png", "x", "..", "%2e%2e", "\0", "é", "a" * 300)


@dataclass(frozen=True, slots=True)
class WildCall:
    """One call, as an ASGI server would pass it on.

    Attributes:
        leaves: whether the client goes away as soon as it has sent its body.
    """

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    chunks: tuple[bytes, ...]
    leaves: bool

    @property
    def is_preflight(self) -> bool:
        """Whether it is answered for browsers alone."""
        names = {name for name, _ in self.headers}
        return self.method == "OPTIONS" and {"origin", "access-control-request-method"} <= names

    def wire(self, *headers: tuple[str, str]) -> bytes:
        """Return it as HTTP/1.1, framed rightly and with further headers."""
        body = b"".join(self.chunks)
        rows = [one for one in self.headers if one[0] not in _FRAMING]
        rows += [*headers, ("content-length", str(len(body))), ("connection", "close")]
        target = quote(self.path, safe="/*%", errors="surrogatepass") or "/"
        target += f"?{self.query}" if self.query else ""
        lines = [f"{name}: {value}".replace("\r\n", " ") for name, value in rows]
        head = "\r\n".join([f"{self.method} {target} HTTP/1.1", *lines, "", ""])
        return head.encode("latin-1") + body

    def scope(self) -> Scope:
        """Return its ASGI scope; each call has its own."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": quote(self.path, errors="surrogatepass").encode(),
            "query_string": self.query.encode("latin-1"),
            "root_path": "",
            "headers": [(a.encode("latin-1"), b.encode("latin-1")) for a, b in self.headers],
            "server": ("gateway", 80),
            "client": ("127.0.0.1", 4711),
            "state": {},
        }


@dataclass(slots=True)
class WildReply:
    """What came back; status 0 where nothing did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def take(self, message: Message) -> None:
        """Add what the application sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            found = message["headers"]
            self.headers = {a.decode("latin-1"): b.decode("latin-1") for a, b in found}
        else:
            self.body += message.get("body", b"")


class WildCalls:
    """Makes calls up, from a seed; those that nearly work as often as nonsense.

    Args:
        without: fields that stay as they are.
    """

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        self._rng = random.Random(seed)
        self._names = [name for name in NAMES if name not in without]

    def next(self, job_ids: Sequence[str], file_ids: Sequence[str]) -> WildCall:
        """Return a call; the ids are of what there is."""
        rng = self._rng
        pattern = rng.choice(POSTED if rng.random() < 0.5 else PATHS)
        ids = {"{job}": job_ids, "{file}": file_ids, "{model}": ("shapes", "late")}
        path = pattern
        for mark, known in ids.items():
            path = path.replace(
                mark, rng.choice(known if known and rng.random() < 0.6 else SOME_ID)
            )
        if rng.random() < 0.05:
            path = rng.choice((path + "/", "/v1" + path, path.upper(), path + "\0", "//" + path))
        usual = "POST" if pattern in POSTED else "GET"
        method = usual if rng.random() < 0.7 else rng.choice(METHODS)
        body = self._body()
        cut = rng.randrange(len(body) + 1)
        return WildCall(
            method=method,
            path=path,
            query=rng.choice(QUERIES) if rng.random() < 0.3 else "",
            headers=self._headers(),
            chunks=(body[:cut], body[cut:]) if rng.random() < 0.3 else (body,),
            leaves=rng.random() < 0.05,
        )

    def _headers(self) -> tuple[tuple[str, str], ...]:
        rng = self._rng
        # most calls get past the check of the content type
        found = [("content-type", "application/json")] if rng.random() < 0.9 else []
        names = rng.sample(sorted(HEADERS), rng.choice((0, 0, 1, 2, 5)))
        found += [(name, rng.choice(HEADERS[name])) for name in names]
        if found and rng.random() < 0.05:
            found.append(rng.choice(found))
        return tuple(found)

    def _body(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.choice(RAW_BODIES)
        fields: dict[str, Any] = {} if rng.random() < 0.1 else {"prompt": "a red circle"}
        # one strange field is more telling than many
        for _ in range(rng.choice((0, 0, 1, 1, 2, 6))):
            fields[rng.choice(self._names)] = self._value(3)
        text = json.dumps(fields)
        # as JavaScript writes it, or with escapes
        return text.encode() if rng.random() < 0.9 else text.encode("utf-16")

    def _value(self, depth: int) -> Any:
        rng = self._rng
        match rng.randrange(8 if depth else 6):
            case 0 | 1 | 2:
                return rng.choice(TEXTS)
            case 3 | 4:
                return rng.choice(NUMBERS)
            case 5:
                return None
            case 6:
                return [self._value(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(NAMES): self._value(depth - 1) for _ in range(rng.randrange(3))}


async def made(app: ASGIApp, call: WildCall) -> WildReply:
    """Make a call as an ASGI server does; whatever the application raises is raised here."""
    reply, chunks = WildReply(), list(call.chunks)
    is_over = asyncio.Event()

    async def receive() -> Message:
        if chunks:
            return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}
        if not call.leaves:
            await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        reply.take(message)

    # a stream that does not end fails here
    async with asyncio.timeout(20):
        await app(call.scope(), receive, send)
    is_over.set()
    return reply
