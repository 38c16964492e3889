"""Lets web pages of the configured origins call the API (CORS)."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ray_cluster.api.access.middleware import REQUEST_ID_HEADER
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.sections.http import HttpSettings

_METHODS = ("GET", "HEAD", "POST", "DELETE")
# what a page may read of a reply beside its body and type
_EXPOSED = (REQUEST_ID_HEADER, "Retry-After", "x-should-retry", "Location", "ETag", "Allow")


class BrowserMiddleware:
    """Starlette's CORS middleware with the present settings.

    Preflights are answered here, without a key; every other reply, errors too, gets the headers.
    """

    def __init__(self, app: ASGIApp, settings: CurrentSettings) -> None:
        self._app = app
        self._settings = settings
        self._built_for = HttpSettings()
        self._with_headers: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if self._settings.http is not self._built_for:
            self._built_for = self._settings.http
            self._with_headers = self._built()
        await self._with_headers(scope, receive, send)

    def _built(self) -> ASGIApp:
        origins = self._built_for.cors_origins
        if not origins:
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
