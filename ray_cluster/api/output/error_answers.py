"""Turns every exception of a call into an error of OpenAI's form."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.api.access.middleware import request_id_of
from ray_cluster.api.errors import ApiError, from_invalid, from_unavailable
from ray_cluster.api.input.validation import describe
from ray_cluster.config.validation_errors import must_be
from ray_cluster.errors import InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

# nginx's custom for a client that left; nobody reads it
CLIENT_CLOSED_REQUEST = 499
_METHODS = ("GET", "HEAD", "POST", "DELETE")


def install(app: FastAPI) -> None:
    """Register the handlers of the expected exceptions on ``app``."""

    async def expected(request: Request, error: Exception) -> Response:
        return _api_error(request, error).response()

    async def disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, InvalidRequest, Unavailable, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(ClientDisconnect, disconnected)


class UnexpectedErrorMiddleware:
    """Answers an unexpected exception with 500, and raises it again for the server.

    Starlette's handler of ``Exception`` runs outside of all middleware: its reply would have no
    request id, and no page from another origin could read it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if scope["type"] == "http":
                request_id = request_id_of(Request(scope))
                logger.error("request %s failed unexpectedly", request_id, exc_info=error)
                if not has_begun:
                    await _unexpected(request_id).response()(scope, receive, send)
            raise


def _unexpected(request_id: str) -> ApiError:
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"The service failed unexpectedly; its log tells more under {request_id}.",
        code="internal_error",
    )


def _api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return from_invalid(error)
        case RequestValidationError():
            return _of_fastapi(error)
        case HTTPException():
            return _of_starlette(request, error)
    assert isinstance(error, Unavailable)
    logger.warning("a call is not served: %s: %s", type(error).__name__, error)
    return from_unavailable(error)


def _of_fastapi(error: RequestValidationError) -> ApiError:
    item = error.errors()[0]
    name = str(item["loc"][-1])
    allowed = must_be(item)
    what = f"is wrong: {item['msg']}" if allowed is None else f"must be {allowed}"
    message = f"The parameter {name!r} {what}; given {describe(item['input'])}."
    return from_invalid(InvalidRequest(message, name))


def _of_starlette(request: Request, error: HTTPException) -> ApiError:
    what = f"{request.method} {request.scope['path']}"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(request))
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"There is no {what}; /docs lists the calls."
        code = "unknown_url"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{what} is not allowed; use {headers['Allow']}."
        code = "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    return ApiError(error.status_code, message, code=code, headers=headers)


def _methods(request: Request) -> list[str]:
    """Return all methods of a path; Starlette names those of the first route alone."""

    def is_there(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in _METHODS if is_there(method)]
