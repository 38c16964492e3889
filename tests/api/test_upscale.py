"""`upscale`: what becomes of it, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.requests import UpscaleUse
from tests.api.checks import URL, refused
from tests.api.conftest import http_of
from tests.fakes import FakeDispatcherClient, memory_results, sent_images, settings_for

UPSCALERS = [{"name": "first", "max_px": 256}]


def app_of(fake: FakeDispatcherClient, config: ClusterConfig, upscalers: list[Any]) -> FastAPI:
    content = {**config.model_dump(mode="json"), "upscalers": upscalers}
    settings = settings_for(ClusterConfig.model_validate(content))
    return create_app(fake, settings, results=memory_results(), images=sent_images())


async def made(
    fake: FakeDispatcherClient, config: ClusterConfig, upscalers: list[Any], **body: Any
) -> httpx.Response:
    async with http_of(app_of(fake, config, upscalers)) as http:
        return await http.post(URL, json={"prompt": "a red circle", **body})


@pytest.mark.parametrize("factor", [2, 4])
async def test_an_image_is_enlarged_by_the_upscaler(
    fake: FakeDispatcherClient, config: ClusterConfig, factor: int
) -> None:
    side = 256 // factor
    reply = await made(fake, config, UPSCALERS, upscale=factor, size=f"{side}x64", n=2)
    assert reply.status_code == 200, reply.text
    assert reply.json()["size"] == f"256x{factor * 64}"
    for request in fake.offered[0]:
        assert request.upscale == UpscaleUse("first", factor)
        assert request.size_px == request.canvas_px == (side, 64)
        assert request.recipe()["upscale"] == str(factor)
        assert request.recipe()["size"] == f"{side}x64"


@pytest.mark.parametrize("body", [{}, {"upscale": 1}, {"upscale": None}])
async def test_one_is_as_if_it_was_not_there(
    fake: FakeDispatcherClient, config: ClusterConfig, body: dict[str, Any]
) -> None:
    assert (await made(fake, config, [], **body)).status_code == 200
    [request] = fake.offered[0]
    assert request.upscale is None
    assert "upscale" not in request.recipe()


@pytest.mark.parametrize(
    ("upscalers", "body", "words"),
    [
        (UPSCALERS, {"upscale": 3}, "must be 1, 2 or 4; given 3"),
        (UPSCALERS, {"upscale": 0}, "must be 1, 2 or 4; given 0"),
        (UPSCALERS, {"upscale": "2"}, "must be 1, 2 or 4; given '2'"),
        (UPSCALERS, {"upscale": 4, "size": "96x64"}, "is 4, which makes 384x256 of 96x64; the"),
        (UPSCALERS, {"upscale": 4, "size": "96x64"}, "256 px at most. Set it to 2, or give a"),
        (UPSCALERS, {"upscale": 2, "size": "192x64"}, "Leave it out, or give a smaller 'size'"),
        ([], {"upscale": 2}, "this service has no upscaler"),
    ],
)
async def test_what_nobody_enlarges_is_refused(
    fake: FakeDispatcherClient,
    config: ClusterConfig,
    upscalers: list[Any],
    body: dict[str, Any],
    words: str,
) -> None:
    async with http_of(app_of(fake, config, upscalers)) as http:
        assert words in await refused(http, "upscale", prompt="a red circle", **body)
    assert fake.offered == []


@pytest.mark.parametrize(("upscalers", "allowed"), [([], [1]), (UPSCALERS, [1, 2, 4])])
async def test_the_schema_and_the_cards_say_what_this_service_does(
    fake: FakeDispatcherClient, config: ClusterConfig, upscalers: list[Any], allowed: list[int]
) -> None:
    app = app_of(fake, config, upscalers)
    body = app.openapi()["paths"][URL]["post"]["requestBody"]["content"]["application/json"]
    upscale = body["schema"]["properties"]["upscale"]
    [number] = [one for one in upscale["anyOf"] if one["type"] == "integer"]
    assert number["enum"] == allowed
    async with http_of(app) as http:
        card = (await http.get("/v1/models/shapes")).json()["upscale"]
    assert card == ({"factors": allowed, "max_px": 256} if upscalers else None)
