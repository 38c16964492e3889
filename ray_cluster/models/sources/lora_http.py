"""Files by HTTP from sources that callers name: no other host is asked, nor a slow one for long."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ray_cluster.errors import InvalidRequest, without_password
from ray_cluster.models.sources.addresses import PrivateHosts, is_address, is_public

logger = logging.getLogger(__name__)

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
# statuses that asking again does not change
_NEVER = (400, 401, 403, 404, 405, 410, 451)
# until a server answers; and the time over which its rate is measured
_ANSWER_S = 30.0
_RATE_S = 30.0
_NOT_PUBLIC = (
    "its host has no public address; name it in loras.private_hosts of the configuration if it may "
    "be asked all the same"
)


@dataclass(frozen=True, slots=True)
class Web:
    """What may be asked by HTTP.

    Attributes:
        may_ask: whether a URL may be: the first one, and each that one redirects to.
        private_hosts: those that may be asked at addresses that are not public.
        addresses: likewise, where a URL itself has them as its host.
        headers: of a request for a URL.
        proxy: for a URL; None for none.
        min_bytes_per_s: what a server must send, from half a minute to the next.
    """

    may_ask: Callable[[URL], bool]
    private_hosts: PrivateHosts
    addresses: Collection[str] = ()
    headers: Callable[[URL], Mapping[str, str]] = lambda _url: {}
    proxy: Callable[[URL], str | None] = lambda _url: None
    min_bytes_per_s: int = 0


def download(url: URL, web: Web, write: Callable[[bytes], object]) -> None:
    """Hand the content of a URL to ``write``, piece by piece.

    Raises:
        InvalidRequest: it, or what it redirects to, may not be asked.
        OSError: it does not answer, or not with the file. Of a host that is not public, nothing
            else is said.
    """
    asyncio.run(_download(url, web, write))


async def _download(url: URL, web: Web, write: Callable[[bytes], object]) -> None:
    await _Download(url, web).run(write)


class _Resolver(AbstractResolver):
    """Finds the addresses of hosts, and only those that may be reached.

    Whoever owns a name can change its address at any time: the one that is checked here is the one
    that is connected to.

    Attributes:
        has_refused: whether a host had no other addresses.
        is_private: whether one of those that were found is not public.
    """

    def __init__(self, private_hosts: PrivateHosts) -> None:
        self._private_hosts = private_hosts
        self._inner = aiohttp.ThreadedResolver()
        self.has_refused = False
        self.is_private = False

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host that may be reached; OSError without any."""
        found = await self._inner.resolve(host, port, family)
        others = [one for one in found if not is_public(one["host"])]
        allowed = [one for one in others if self._private_hosts.allow(host, one["host"])]
        self.is_private |= bool(allowed)
        reached = [one for one in found if one not in others or one in allowed]
        if not reached:
            self.has_refused = True
            raise OSError("no address of it may be reached")
        return reached

    async def close(self) -> None:
        await self._inner.close()


class _Download:
    """One download, over its redirects."""

    def __init__(self, url: URL, web: Web) -> None:
        self._url = url
        self._web = web
        self._shown = without_password(url)
        self._resolver = _Resolver(web.private_hosts)

    async def run(self, write: Callable[[bytes], object]) -> None:
        # what is compressed could grow without bound; cookies and proxies are of nobody here
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=self._resolver, use_dns_cache=False, force_close=True
            ),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        url = self._url
        async with session:
            for _ in range(1 + _MAX_REDIRECTS):
                async with await self._asked(session, url) as response:
                    if response.status not in _REDIRECTS:
                        async for piece in self._pieces(response):
                            write(piece)
                        return
                    url = self._target(response)
        raise OSError(f"{self._shown} redirects more than {_MAX_REDIRECTS} times")

    async def _asked(self, session: aiohttp.ClientSession, url: URL) -> aiohttp.ClientResponse:
        """Return the answer of a URL: its file, or a redirect."""
        if not self._web.may_ask(url):
            if url == self._url:
                raise self._wrong("it is not allowed (loras.sources of the configuration)")
            logger.warning("%s redirects to %s://%s", self._shown, url.scheme, url.host)
            raise self._wrong(
                "it redirects to where it may not; what it leads to must be allowed, too "
                "(loras.sources of the configuration)"
            )
        host = url.host or ""
        if is_address(host) and not is_public(host) and not self._may_reach(host):
            raise self._wrong(_NOT_PUBLIC)
        headers, proxy = self._web.headers(url), self._web.proxy(url)
        try:
            async with asyncio.timeout(_ANSWER_S):
                response = await session.get(
                    url, headers=headers, proxy=proxy, allow_redirects=False
                )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if self._resolver.has_refused:
                raise self._wrong(_NOT_PUBLIC) from error
            raise self._failed(url, "cannot be reached") from error
        if response.status not in (200, *_REDIRECTS):
            response.close()
            if response.status in _NEVER and not self._is_private(url):
                what = f"its host answers with status {response.status}"
                raise self._wrong(f"{what}: it is not there, or not for this service")
            raise self._failed(url, f"answers with status {response.status}")
        return response

    def _may_reach(self, address: str) -> bool:
        is_named = address in self._web.addresses
        return is_named or self._web.private_hosts.allow(address, address)

    def _target(self, response: aiohttp.ClientResponse) -> URL:
        try:
            return response.url.join(URL(response.headers.get("Location", ""))).with_fragment(None)
        except ValueError as error:
            raise self._failed(response.url, "redirects to what is no URL") from error

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        loop, least = asyncio.get_running_loop(), self._web.min_bytes_per_s
        end_s, num_bytes = loop.time() + _RATE_S, 0
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    piece = await response.content.readany()
            except TimeoutError:
                if num_bytes < least * _RATE_S:
                    what = f"sends less than {least} bytes a second (loras.min_fetch_bytes_per_s)"
                    raise self._failed(response.url, what) from None
                end_s, num_bytes = loop.time() + _RATE_S, 0
                continue
            except (aiohttp.ClientError, OSError) as error:
                raise self._failed(response.url, "has broken off") from error
            if not piece:
                return
            num_bytes += len(piece)
            yield piece

    def _wrong(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self._shown}: {reason}.", "source")

    def _failed(self, url: URL, what: str) -> OSError:
        """Return what a failure is; one word for all of a host that is not public.

        Callers would learn from more which hosts and ports are there.
        """
        shown = "does not give the file" if self._is_private(url) else what
        return OSError(f"{self._shown} {shown}")

    def _is_private(self, url: URL) -> bool:
        host = url.host or ""
        return self._resolver.is_private or (is_address(host) and not is_public(host))
