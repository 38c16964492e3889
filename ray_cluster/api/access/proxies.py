"""What clients have called, where reverse proxies stand between them and Ray Serve's proxy.

Links start with the address of the call, so it is put right once, in the scope of each call, and
everything else reads it there.

The peer is what connects to Ray Serve's own HTTP proxy (uvicorn), which passes each call on with
its scope: the gateway's own connection says nothing. uvicorn would already believe
``X-Forwarded-For`` and ``-Proto`` of any peer on its machine, and hide that peer's address;
:mod:`ray_cluster.deployments.serve.ray_environment` turns that off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from ray_cluster.api.settings import CurrentSettings

_Networks = tuple[IPv4Network | IPv6Network, ...]
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~%+-]+)+")
_PAIR = re.compile(r'([A-Za-z]+)=(?:"([^"]*)"|([^";,\s]*))')
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_X_NAMES = ("for", "proto", "host", "port", "prefix")


@dataclass(frozen=True, slots=True)
class _Called:
    """What trusted proxies say of a call; empty where they say nothing usable.

    Attributes:
        host: with the port, unless it is the scheme's own.
        prefix: path that a proxy has taken off.
    """

    client: str = ""
    scheme: str = ""
    host: str = ""
    prefix: str = ""


class ProxyMiddleware:
    """Puts a call's scheme, host, path and client right: as its client sees them.

    ``http.public_url`` says where clients call; without it trusted proxies do.
    """

    def __init__(self, app: ASGIApp, settings: CurrentSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        http = self._settings.latest.http
        if scope["type"] == "http" and (http.public_url or http.trusted_proxies):
            scope = _as_called(scope, http.public_url, http.trusted_networks)
        await self._app(scope, receive, send)


def _as_called(scope: Scope, public_url: str | None, trusted: _Networks) -> Scope:
    headers = Headers(scope=scope)
    peer, port = scope.get("client") or ("", 0)
    called = _called(headers, trusted) if _is_trusted(peer, trusted) else _Called()
    client = (called.client, 0) if called.client else (peer, port)
    scheme, host, prefix = called.scheme, called.host, called.prefix
    if public_url is not None:
        public = urlsplit(public_url)
        scheme, host, prefix = public.scheme, public.netloc, public.path
    scope = {**scope, "client": client, "headers": list(scope["headers"])}
    if scheme:
        scope["scheme"] = scheme
    if host:
        MutableHeaders(scope=scope)["host"] = host
    if prefix:
        # as ASGI has it, the path holds the prefix
        scope |= {"root_path": prefix, "path": prefix + scope["path"]}
    return scope


def _called(headers: Headers, trusted: _Networks) -> _Called:
    """Return what the nearest trusted proxies say.

    A list has what each proxy found, the nearest last. What lies beyond the first address that is
    not trusted was written by the client, and means nothing.
    """
    lists = {name: _listed(headers, f"x-forwarded-{name}") for name in _X_NAMES}
    if not any(lists.values()):
        # not both: a proxy passes on what it does not write itself, whoever has written it
        elements = [_pairs(one) for one in _listed(headers, "forwarded")]
        lists = {name: [one.get(name, "") for one in elements] for name in _X_NAMES}
    chain = [_address(one) for one in lists["for"]]
    num_proxies = 0
    while num_proxies < len(chain) - 1 and _is_trusted(chain[-1 - num_proxies], trusted):
        num_proxies += 1
    said = {
        name: values[max(0, len(values) - 1 - num_proxies)] if values else ""
        for name, values in lists.items()
    }
    scheme = said["proto"].lower()
    scheme = scheme if scheme in _DEFAULT_PORTS else ""
    return _Called(
        client=_address(said["for"]),
        scheme=scheme,
        host=_host(said["host"] or headers.get("host", ""), said["port"], scheme),
        prefix=prefix if _PREFIX.fullmatch(prefix := said["prefix"].rstrip("/")) else "",
    )


def _listed(headers: Headers, name: str) -> list[str]:
    return [one.strip() for line in headers.getlist(name) for one in line.split(",")]


def _pairs(element: str) -> dict[str, str]:
    """Return the parts of one element of ``Forwarded`` (RFC 7239)."""
    return {name.lower(): quoted or token for name, quoted, token in _PAIR.findall(element)}


def _host(given: str, port: str, scheme: str) -> str:
    """Return a host with its port; empty if it is none."""
    name, own_port = _split_port(given)
    if _HOST.fullmatch(name) is None:
        return ""
    port = own_port or port
    is_named = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16
    is_needed = is_named and port != _DEFAULT_PORTS.get(scheme)
    return f"{name}:{port}" if is_needed else name


def _split_port(text: str) -> tuple[str, str]:
    name, mark, port = text.rpartition(":")
    # the colons of a bare IPv6 address part no port
    is_port = bool(mark) and (":" not in name or name.endswith("]"))
    return (name, port) if is_port else (text, "")


def _address(text: str) -> str:
    """Return the IP address in an element of ``X-Forwarded-For``; empty if there is none."""
    try:
        return str(ip_address(_split_port(text)[0].strip("[]")))
    except ValueError:
        return ""


def _is_trusted(address: str, trusted: _Networks) -> bool:
    try:
        found: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in trusted)
