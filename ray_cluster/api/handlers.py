"""Every way in which a call can go wrong ends in an error of OpenAI's form."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ray_cluster.api.errors import ApiError, from_invalid, from_unavailable
from ray_cluster.api.request_id import HEADER, HeaderWriter, request_id_of
from ray_cluster.api.validate import describe
from ray_cluster.config.validation_errors import must_be
from ray_cluster.errors import InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

# what nginx made the custom for a client that left; nobody reads it
CLIENT_CLOSED_REQUEST = 499


def install(app: FastAPI, writer: HeaderWriter) -> None:
    """Register the handlers of all exceptions on ``app``."""

    async def unexpected(request: Request, error: Exception) -> Response:
        request_id = request_id_of(request)
        logger.error("request %s failed unexpectedly", request_id, exc_info=error)
        response = ApiError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"The service failed unexpectedly; its log tells more under {request_id}.",
            code="internal_error",
        ).response()
        if writer == "app":
            # this handler runs outside of the middleware that writes it elsewhere
            response.headers[HEADER] = request_id
        return response

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(InvalidRequest, _invalid)
    app.add_exception_handler(Unavailable, _unavailable)
    app.add_exception_handler(RequestValidationError, _fastapi_invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, unexpected)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    return from_invalid(error).response()


async def _unavailable(_: Request, error: Exception) -> Response:
    assert isinstance(error, Unavailable)
    logger.warning("a call is not served: %s: %s", type(error).__name__, error)
    return from_unavailable(error).response()


async def _fastapi_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    item = error.errors()[0]
    name = str(item["loc"][-1])
    allowed = must_be(item)
    what = f"is wrong: {item['msg']}" if allowed is None else f"must be {allowed}"
    message = f"The parameter {name!r} {what}; given {describe(item['input'])}."
    return from_invalid(InvalidRequest(message, name)).response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"There is no {what}; /docs lists the calls."
        code = "unknown_url"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = headers.get("Allow", "another method")
        message = f"{what} is not allowed; use {allowed}."
        code = "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    return ApiError(error.status_code, message, code=code, headers=headers).response()


async def _disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
