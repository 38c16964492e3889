"""Bearer API keys."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from ray_cluster.api.errors import ApiError
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.settings import key_digest
from ray_cluster.storage.inputs import OPEN_OWNER

BEARER = HTTPBearer(auto_error=False, description="One of the configured `http.api_keys`.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]


def key_guard(settings: CurrentSettings) -> Callable[..., Awaitable[None]]:
    """Return a FastAPI dependency that refuses calls without one of the present keys.

    Before the settings have come every call is refused; without keys in them, none. All digests
    are compared in constant time at every call: the time of an answer tells nothing about a key.
    """

    async def check(request: Request, credentials: Credentials) -> None:
        digests = settings.get().api_key_digests
        if not digests:
            return
        if credentials is None:
            raise _unauthorized("No API key given: send 'Authorization: Bearer <key>'.")
        given = key_digest(credentials.credentials)
        matches = [hmac.compare_digest(given, digest) for digest in digests]
        if not any(matches):
            raise _unauthorized("The API key is not valid; ask whoever runs this service for one.")
        request.state.client = given

    return check


def client_of(request: Request) -> str:
    """Return the client of a call: a digest of its API key, or nothing on an open service."""
    return str(getattr(request.state, "client", ""))


def owner_of(request: Request) -> str:
    """Return the owner of the images that a call may read and stores in the input store."""
    return client_of(request) or OPEN_OWNER


def caller_of(request: Request) -> str:
    """Return whose images in flight are counted together: the client, else the address."""
    address = request.client.host if request.client is not None else ""
    return client_of(request) or f"address {address}"


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        HTTPStatus.UNAUTHORIZED,
        message,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
