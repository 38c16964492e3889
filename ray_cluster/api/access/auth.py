"""Bearer API keys: whose call it is, and what its key allows."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Annotated

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from ray_cluster.api.errors import ApiError
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.sections.keys import ROLES, Role, key_digest
from ray_cluster.protocol.jobs import ADDRESS
from ray_cluster.storage.inputs import OPEN_OWNER

_IPV6_PREFIX = 64

BEARER = HTTPBearer(auto_error=False, description="One of the configured `http.api_keys`.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        client: the key's; nothing on an open service.
        roles: of the key alone, whatever others its client has.
    """

    client: str
    roles: tuple[Role, ...]


def key_guard(settings: CurrentSettings) -> Callable[..., Awaitable[None]]:
    """Return a FastAPI dependency that refuses calls without one of the present keys.

    Before the settings have come every call is refused; without keys in them, none. All digests
    are compared in constant time at every call: the time of an answer tells nothing about a key.
    """

    async def check(request: Request, credentials: Credentials) -> None:
        await settings.first()
        keys = settings.api_keys()
        if not keys:
            request.state.caller = Caller("", ROLES)
            return
        if credentials is None:
            raise _unauthorized("No API key given: send 'Authorization: Bearer <key>'.")
        given = key_digest(credentials.credentials)
        matches = [key for key in keys if hmac.compare_digest(given, key.digest)]
        if not matches:
            raise _unauthorized("The API key is not valid; ask whoever runs this service for one.")
        request.state.caller = Caller(matches[0].client, matches[0].roles)

    return check


def role_guard(roles: tuple[Role, ...]) -> Callable[[Request], Awaitable[None]]:
    """Return a FastAPI dependency, to follow a key guard: the key must have one of these roles."""

    async def check(request: Request) -> None:
        if not any(one in _caller(request).roles for one in roles):
            raise _role_missing(request, "This call", roles)

    return check


def check_priority(request: Request, priority: int | None) -> None:
    """Refuse to go before others, unless the key may.

    Raises:
        ApiError: 403, it has not the role.
    """
    if (priority or 0) > 0 and "operate" not in _caller(request).roles:
        what = f"Set the parameter 'priority' to 0 or less: {priority}"
        raise _role_missing(request, what, ("operate",), "priority")


def client_of(request: Request) -> str:
    """Return who calls: the key's name or digest, or on an open service the address."""
    return _caller(request).client or _address_of(request)


def owner_of(request: Request) -> str:
    """Return the owner of the images that a call may read and stores in the input store."""
    return _without_dots(_caller(request).client) or OPEN_OWNER


def caller_of(request: Request) -> str:
    """Return who calls as its share is counted, in which a client's name is the owner's."""
    return _without_dots(_caller(request).client) or _address_of(request)


def _address_of(request: Request) -> str:
    address = request.client.host if request.client is not None else ""
    return f"{ADDRESS}{_network_of(address)}"


def _without_dots(client: str) -> str:
    # the input store has no dots in names of owners, and clients have no capitals
    return client.replace(".", "D")


def _network_of(address: str) -> str:
    """Return an address; of IPv6, its network of 64 bits, for one client has all that are in it."""
    with suppress(ValueError):
        found = ip_address(address.partition("%")[0])
        if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
            return str(IPv6Network((found, _IPV6_PREFIX), strict=False))
    return address


def _caller(request: Request) -> Caller:
    # where no guard has looked, nobody has a role
    caller: Caller = getattr(request.state, "caller", Caller("", ()))
    return caller


def _role_missing(
    request: Request, what: str, roles: tuple[Role, ...], param: str | None = None
) -> ApiError:
    needed, has = (" or ".join(map(repr, roles)), ", ".join(map(repr, _caller(request).roles)))
    return ApiError(
        HTTPStatus.FORBIDDEN,
        f"{what} needs an API key with the role {needed}, and yours has {has}. Ask whoever runs "
        "this service for one.",
        code="role_missing",
        param=param,
    )


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        HTTPStatus.UNAUTHORIZED,
        message,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
