"""Takes from calls, in Ray Serve's proxy, the headers by which its callers command it.

A client must not set Serve's own time limit, or have its call go on when it leaves; and the proxy
answers a bare 500 where one of these headers is no UTF-8. An ``X-Request-ID`` that the gateway
would not take goes, too: the proxy then draws one, and reply, errors and logs have the same.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ray_cluster.observability.logs import REQUEST_ID

# as Serve compares them
_COMMANDS = {
    b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled",
    b"x_session_id",
    b"serve_multiplexed_model_id",
}


class CommandFilter:
    """Passes a call on without them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            kept = [(name, value) for name, value in scope["headers"] if _is_kept(name, value)]
            scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)


def _is_kept(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return REQUEST_ID.fullmatch(value.decode("latin-1")) is not None
    if name == b"traceparent":
        return value.isascii()
    return name.lower().replace(b"-", b"_") not in _COMMANDS
