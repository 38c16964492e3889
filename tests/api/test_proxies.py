"""Links lead back the way that a call came, as trusted proxies or the configuration tell it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ray_cluster.api.access.proxies import ProxyMiddleware
from ray_cluster.api.app import create_app
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.http import HttpConfig
from tests.api.checks import URL
from tests.fakes import sent_images, settings_for
from tests.jobs.jobs_cell import JobsCell, Replica, until

PROXY, INNER_PROXY, STRANGER = "10.0.0.5", "fd00::7", "203.0.113.9"
TRUSTED = ("10.0.0.0/8", INNER_PROXY)
DIRECT = "http://gateway:8000"


def settings(config: ClusterConfig, **http: Any) -> CurrentSettings:
    return settings_for(config.model_copy(update={"http": HttpConfig(**http)}))


async def seen(config: ClusterConfig, peer: str, headers: Any, **http: Any) -> tuple[str, str]:
    """What an application behind the middleware takes for its address and its client."""

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        assert request.client is not None
        reply = JSONResponse([str(request.base_url).rstrip("/"), request.client.host])
        await reply(scope, receive, send)

    app = ProxyMiddleware(echo, settings(config, **http))
    transport = httpx.ASGITransport(app, client=(peer, 4711))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url=DIRECT) as client:
        base, host = (await client.get("/v1/models", headers=headers)).json()
    return base, host


@pytest.mark.parametrize(
    ("headers", "base"),
    [
        ([], DIRECT),
        ([("X-Forwarded-Proto", "https")], "https://gateway:8000"),
        ([("X-Forwarded-Proto", "https"), ("Host", "example.com")], "https://example.com"),
        ([("X-Forwarded-Host", "example.com")], "http://example.com"),
        ([("X-Forwarded-Host", "example.com:8443")], "http://example.com:8443"),
        ([("X-Forwarded-Host", "[2001:db8::1]:8443")], "http://[2001:db8::1]:8443"),
        ([("X-Forwarded-Prefix", "/images/")], f"{DIRECT}/images"),
        (
            [
                ("X-Forwarded-Proto", "https"),
                ("X-Forwarded-Host", "example.com"),
                ("X-Forwarded-Port", "443"),
                ("X-Forwarded-Prefix", "/a/b"),
            ],
            "https://example.com/a/b",
        ),
        (
            [("X-Forwarded-Host", "example.com"), ("X-Forwarded-Port", "8080")],
            "http://example.com:8080",
        ),
        # a route of ours as the prefix
        ([("X-Forwarded-Prefix", "/v1")], f"{DIRECT}/v1"),
        (
            [("Forwarded", 'for=192.0.2.1;proto=https;host="example.com:8443"')],
            "https://example.com:8443",
        ),
        ([("Forwarded", "For=192.0.2.1; Proto=HTTPS; Host=example.com")], "https://example.com"),
        # the client's own come before what the nearest proxy adds
        (
            [("Forwarded", "for=1.2.3.4;host=evil.com, for=192.0.2.1;host=example.com")],
            "http://example.com",
        ),
        (
            [
                ("X-Forwarded-For", "1.2.3.4, 192.0.2.1"),
                ("X-Forwarded-Host", "evil.com, example.com"),
            ],
            "http://example.com",
        ),
        # two trusted proxies in a row, in one header or in two
        (
            [
                ("X-Forwarded-For", f"192.0.2.1, {INNER_PROXY}"),
                ("X-Forwarded-Host", "example.com, inner"),
                ("X-Forwarded-Proto", "https"),
                ("X-Forwarded-Proto", "http"),
            ],
            "https://example.com",
        ),
        (
            [
                (
                    "Forwarded",
                    f'for=192.0.2.1;host=example.com;proto=https, for="[{INNER_PROXY}]:80"',
                )
            ],
            "https://example.com",
        ),
        # a proxy that writes the one passes on the other
        (
            [("X-Forwarded-Host", "example.com"), ("Forwarded", "host=evil.com")],
            "http://example.com",
        ),
        # nonsense is ignored
        ([("X-Forwarded-Host", "exam ple/.com")], DIRECT),
        ([("X-Forwarded-Proto", "javascript")], DIRECT),
        ([("X-Forwarded-Prefix", "no-slash")], DIRECT),
        ([("X-Forwarded-Prefix", "//evil.com")], DIRECT),
        ([("X-Forwarded-Port", "99999999999")], DIRECT),
        ([("Forwarded", ";;,=")], DIRECT),
    ],
)
async def test_a_trusted_proxy_is_believed_and_a_stranger_is_not(
    config: ClusterConfig, headers: Any, base: str
) -> None:
    for peer in (PROXY, f"::ffff:{PROXY}"):
        assert (await seen(config, peer, headers, trusted_proxies=TRUSTED))[0] == base
    host = dict(headers).get("Host")
    untouched = DIRECT if host is None else f"http://{host}"
    assert await seen(config, STRANGER, headers, trusted_proxies=TRUSTED) == (untouched, STRANGER)
    assert await seen(config, PROXY, headers) == (untouched, PROXY)


@pytest.mark.parametrize("peer", [PROXY, STRANGER])
@pytest.mark.parametrize(
    "public_url", ["https://example.com", "https://example.com:8443/a/b", "http://[::1]:80"]
)
async def test_the_configured_address_comes_first(
    config: ClusterConfig, peer: str, public_url: str
) -> None:
    headers = {"X-Forwarded-Host": "other.com", "X-Forwarded-Prefix": "/other"}
    given = {"public_url": f"{public_url}/", "trusted_proxies": TRUSTED}
    assert (await seen(config, peer, headers, **given))[0] == public_url


async def test_every_link_leads_there(
    cell: JobsCell, replica: Replica, config: ClusterConfig
) -> None:
    base = "https://example.com/images"
    body = {"prompt": "a red circle", "partial_images": 1}
    app = create_app(
        cell, settings(config, public_url=base), results=cell.results, images=sent_images()
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=DIRECT) as client:
        reply = await client.post("/v1/jobs", json=body)
        job = reply.json()
        assert reply.headers["location"] == f"{base}/v1/jobs/{job['id']}"
        [lease] = (await replica.poll()).values()
        await replica.show(lease, 0)
        with_preview = (await client.get("/v1/jobs")).text
        await replica.finish(lease)
        events = (await client.get(f"/v1/jobs/{job['id']}/events")).text
        synchronous = asyncio.create_task(
            client.post(URL, json={"prompt": "a red circle", "response_format": "url"})
        )
        await until(lambda: cell.core.num_waiting)
        [lease] = (await replica.poll()).values()
        await replica.finish(lease)
        for text in (with_preview, events, (await synchronous).text):
            assert text.count("/v1/files/") == text.count(f"{base}/v1/files/") == 1
        assert '"/images/openapi.json"' in (await client.get("/docs")).text.replace("'", '"')
        servers = (await client.get("/openapi.json")).json()["servers"]
        assert servers == [{"url": "/images"}]
        # what the client sees, not what the proxy has made of it
        assert "GET /images/v1/x;" in (await client.get("/v1/x")).json()["error"]["message"]


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("6.6.6.6, 203.0.113.8:5555", "203.0.113.8"),
        (f"203.0.113.7, {INNER_PROXY}", "203.0.113.7"),
        ("10.1.1.1, 10.1.1.2", "10.1.1.1"),
        ("unknown", PROXY),
    ],
)
async def test_clients_are_told_apart_behind_a_proxy(
    config: ClusterConfig, forwarded: str, client: str
) -> None:
    headers = {"X-Forwarded-For": forwarded}
    assert await seen(config, PROXY, headers, trusted_proxies=TRUSTED) == (DIRECT, client)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("public_url", "example.com", "must be http:// or https://"),
        ("public_url", "https://example.com/?a=b", "must be http:// or https://"),
        ("public_url", "https://user@example.com", "must be http:// or https://"),
        ("public_url", "https://example.com:0", "must be http:// or https://"),
        ("public_url", "https://example.com:65536", "must be http:// or https://"),
        ("trusted_proxies", ("::ffff:10.0.0.1",), "is no address and no network"),
        ("trusted_proxies", ("nginx",), "'nginx' is no address and no network"),
        ("trusted_proxies", ("10.0.0.0/33",), "is no address and no network"),
    ],
)
def test_what_cannot_be_right_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        HttpConfig(**{key: value})


def test_an_address_of_the_api_is_cut_to_what_links_start_with() -> None:
    assert HttpConfig(public_url="https://example.com/a/v1/").public_url == "https://example.com/a"
