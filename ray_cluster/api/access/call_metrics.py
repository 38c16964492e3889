"""What a gateway counts, and ``GET /metrics``: the sums of the whole cell, from any gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from contextvars import Context
from typing import Unpack

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.api.access.middleware import HttpMiddleware
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.observability.logs import LogFields, log_event
from ray_cluster.observability.metrics_snapshot import Snapshot, render, take
from ray_cluster.process.turns import Shared
from ray_cluster.protocol.dispatcher import DispatcherClient

logger = logging.getLogger(__name__)

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# how soon the others' scrapes know of a call that was answered here
_PUSH_AFTER_S = 0.05
# a gateway without calls reports now and then that it lives
_PUSH_EVERY_S = 5.0
# a caller may name any method
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})
# of an id in a path, which may be anything
_MAX_ID_CHARS = 100


class GatewayMetrics:
    """Calls that one gateway has answered."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ray_cluster_http_requests",
            "HTTP calls answered.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "ray_cluster_http_request_seconds",
            "Seconds from a call to the last byte of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def answered(self, *, route: str, method: str, status: int, seconds: float) -> None:
        """Count a call."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def snapshot(self) -> Snapshot:
        """Return the present values."""
        return take(self._registry)


class GatewayMetricsEndpoint:
    """Counts this gateway's calls, reports them to the dispatcher, and returns the sums of all."""

    def __init__(self, client: DispatcherClient, metrics: GatewayMetrics) -> None:
        self._client = client
        self._process_id = f"gateway-{secrets.token_hex(8)}"
        self._metrics = metrics
        self._has_news = asyncio.Event()
        self._pushing: asyncio.Task[None] | None = None
        # anybody may ask, as often as they like
        self._text = Shared(self._render)

    async def scrape(self) -> Response:
        """Return the metrics of all processes in prometheus' text format."""
        text = await self._text.get()
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _render(self) -> bytes:
        merged = await self._client.metrics(self._process_id, self._metrics.snapshot())
        return await asyncio.to_thread(render, merged)

    def answered(self, *, route: str, method: str, status: int, seconds: float) -> None:
        """Count a call, and have it reported."""
        self._metrics.answered(route=route, method=method, status=status, seconds=seconds)
        self._has_news.set()
        if self._pushing is None or self._pushing.done():
            # in a context of its own: Serve cancels what a cancelled request has called
            self._pushing = asyncio.create_task(self._push_forever(), context=Context())

    async def _push_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PUSH_EVERY_S):
                    await self._has_news.wait()
            await asyncio.sleep(_PUSH_AFTER_S)
            self._has_news.clear()
            try:
                await self._client.report_metrics(self._process_id, self._metrics.snapshot())
            except DispatcherUnavailable as error:
                logger.debug("metrics are reported later: %s", error)


class CallMiddleware(HttpMiddleware):
    """Counts every HTTP call, by the route's pattern, so that ids make no series; and logs it."""

    def __init__(self, app: ASGIApp, endpoint: GatewayMetricsEndpoint) -> None:
        super().__init__(app)
        self._endpoint = endpoint

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call."""
        # until an answer begins: the client has left
        started_s, status = time.perf_counter(), 499

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            # answered outside of all middleware
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            is_known = route != "other" and scope["method"] in _METHODS
            method = scope["method"] if is_known else "other"
            seconds = time.perf_counter() - started_s
            self._endpoint.answered(route=route, method=method, status=status, seconds=seconds)
            _log(scope, route=route, method=method, status=status, elapsed_s=seconds)


def _log(scope: Scope, **fields: Unpack[LogFields]) -> None:
    state, parameters = scope.get("state", {}), scope.get("path_params", {})
    job_id = state.get("job_id") or parameters.get("job_id", "")
    if job_id:
        fields["job_id"] = job_id[:_MAX_ID_CHARS]
    is_api = fields["route"].startswith("/v1/")
    level = logging.WARNING if fields["status"] >= 500 else logging.INFO
    # probes, scrapes and pictures come all the time
    log_event(logger, "call_answered", level=level if is_api else logging.DEBUG, **fields)
