"""The section ``http``: where the service listens, who may call it, what stands in front of it."""

from __future__ import annotations

import re
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_network

from pydantic import Field, field_validator

from ray_cluster.config.section import COUNT, LIVE, Section, absolute
from ray_cluster.config.sections.keys import KeyConfig, check_distinct

_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5])))"
_HOST = rf"([\w.-]+|\[[0-9a-fA-F:.]+\])(:({_PORT}))?"
_PUBLIC_URL = re.compile(rf"https?://{_HOST}(/[\w.~%+-]+)*/?", re.ASCII)
# as browsers write them: without the scheme's own port
_ORIGIN = re.compile(rf"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://{_HOST}", re.ASCII)


class HttpConfig(Section):
    """Where the service listens, who may call it, and what stands in front of it."""

    host: str = Field(
        "127.0.0.1", description="address to listen on; 0.0.0.0 for all of this machine"
    )
    port: int = Field(8000, ge=1, le=65535, description="port of the API")
    keep_alive_s: int = Field(90, ge=1, description="time after which an idle connection is closed")
    public_url: str | None = Field(
        None,
        description="URL under which clients reach the API, without `/v1`, such as "
        "https://example.com/images; links in replies start with it. null: they start with the "
        "address that was called",
        repr=False,  # errors do not show what was given: it may hold a password
        json_schema_extra=LIVE,
    )
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="addresses and networks (10.0.0.0/8) of reverse proxies whose `Forwarded` or "
        "`X-Forwarded-{For,Proto,Host,Port,Prefix}` say what was called, and by whom; from others "
        "these headers are ignored",
        json_schema_extra=LIVE,
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="origins of web pages that may call the API from a browser, such as "
        "https://app.example.com; `*` for all",
        json_schema_extra=LIVE,
    )
    page: bool = Field(
        True,
        description="whether `/` shows the page to make images and watch the cell; false: 404",
        json_schema_extra=LIVE,
    )
    num_gateways: int = Field(
        1, ge=1, le=64, description="gateway processes, which answer calls", json_schema_extra=COUNT
    )
    api_keys: tuple[KeyConfig, ...] = Field((), repr=False, json_schema_extra=LIVE)
    api_keys_file: str | None = Field(
        None,
        description="absolute path of a YAML file on the dispatcher's machine with the key "
        "`api_keys` and more of these entries, such as a mounted Secret of Kubernetes; it is "
        "watched, too",
        json_schema_extra=LIVE,
    )
    open: bool = Field(
        False,
        description="whether a change may remove the last API key, after which anybody may call; a "
        "service that never had one is open without it, and while there are keys it opens nothing",
        json_schema_extra=LIVE,
    )

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, url: str | None) -> str | None:
        if url is not None and _PUBLIC_URL.fullmatch(url) is None:
            raise ValueError(
                "must be http:// or https:// with a host, perhaps a port and a path, and nothing "
                "after it, such as https://example.com/images"
            )
        # as in the base URLs of clients
        return url and url.rstrip("/").removesuffix("/v1")

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for one in given:
            try:
                network = ip_network(one, strict=False)
                if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped:
                    raise ValueError
            except ValueError:
                allowed = "give such as 10.1.2.3, 10.0.0.0/8 or fd00::/8"
                raise ValueError(f"{one!r} is no address and no network; {allowed}") from None
        return given

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for one in given:
            if one != "*" and (one != one.lower() or _ORIGIN.fullmatch(one) is None):
                raise ValueError(
                    f"{one!r} is no origin: browsers send scheme and host, and a port other than "
                    "the scheme's own, in small letters and without a path, such as "
                    "https://app.example.com or http://localhost:3000"
                )
        return given

    @cached_property
    def trusted_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of trusted proxies; an address is a network of one."""
        return tuple(ip_network(one, strict=False) for one in self.trusted_proxies)

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        check_distinct(key.entry for key in keys)
        return keys

    @field_validator("api_keys_file")
    @classmethod
    def _check_keys_file(cls, path: str | None) -> str | None:
        return absolute(path)

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the port may use the service."""
        return not (self.api_keys or self.api_keys_file)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the port."""
        return self.host in {"127.0.0.1", "localhost", "::1"}
