"""A gateway goes by the settings that it has last heard of; before the first it serves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.settings import CurrentSettings, SettingsFeed
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.policies.types import Offer
from ray_cluster.protocol.settings import GatewaySettings, gateway_settings
from tests.api.conftest import http_of, shapes_profile
from tests.fake_loras import ready_lora
from tests.fakes import FakeDispatcherClient, memory_results, sent_images
from tests.jobs.jobs_cell import until

CALL = {"prompt": "a red circle"}


def by(**sections: Any) -> GatewaySettings:
    pools = [{"name": "shapes", "model": "shapes-sd"}]
    content = {"http": {"api_keys": ["one"]}, "pools": pools} | sections
    return gateway_settings(settings_of(ClusterConfig.model_validate(content)))


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def current() -> CurrentSettings:
    return CurrentSettings()


@pytest.fixture
def app(fake: FakeDispatcherClient, current: CurrentSettings) -> FastAPI:
    return create_app(fake, current, results=memory_results(), images=sent_images())


@pytest.fixture
async def call(app: FastAPI) -> AsyncIterator[Any]:
    async with http_of(app, raise_app_exceptions=False) as client:

        async def post(key: str = "one", **fields: Any) -> httpx.Response:
            body = CALL | fields
            return await client.post("/v1/images/generations", json=body, headers=header(key))

        post.client = client  # type: ignore[attr-defined]
        yield post


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/images/generations"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/shapes"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs"),
        ("GET", f"/v1/jobs/job-{'0' * 32}"),
        ("GET", f"/v1/jobs/job-{'0' * 32}/events"),
        ("DELETE", f"/v1/jobs/job-{'0' * 32}"),
        ("GET", f"/v1/files/img-{'0' * 32}.png"),
        ("GET", "/readyz"),
    ],
)
@pytest.mark.parametrize("headers", [{}, header("one")], ids=["no key", "a key"])
async def test_without_settings_nothing_is_served(
    call: Any,
    fake: FakeDispatcherClient,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    headers: dict[str, str],
) -> None:
    monkeypatch.setattr("ray_cluster.api.settings._FIRST_S", 0.02)
    reply = await call.client.request(method, path, json=CALL, headers=headers)
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert fake.offered == []


async def test_a_call_waits_for_the_first_settings(call: Any, current: CurrentSettings) -> None:
    waiting = asyncio.create_task(call.client.get("/v1/models", headers=header("one")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    current.put(by())
    assert (await waiting).status_code == 200


async def test_the_process_lives_and_describes_itself_without_settings(call: Any) -> None:
    assert (await call.client.get("/healthz")).status_code == 200
    document = (await call.client.get("/openapi.json")).json()
    assert "securitySchemes" in document["components"]


async def test_a_key_that_is_rotated_is_refused_and_its_successor_accepted(
    call: Any, current: CurrentSettings
) -> None:
    current.put(by())
    assert (await call("one")).status_code == 200
    assert (await call("two")).status_code == 401
    current.put(by(http={"api_keys": ["one", "two"]}))
    assert [(await call(key)).status_code for key in ("one", "two")] == [200, 200]
    current.put(by(http={"api_keys": ["two"]}))
    assert [(await call(key)).status_code for key in ("one", "two")] == [401, 200]
    current.put(by(http={}))
    assert (await call.client.post("/v1/images/generations", json=CALL)).status_code == 200


async def test_limits_hold_from_the_next_call_on(call: Any, current: CurrentSettings) -> None:
    current.put(by())
    assert (await call(n=3)).status_code == 200
    current.put(by(limits={"max_images_per_request": 2, "max_prompt_chars": 5}))
    assert (await call(n=3)).json()["error"]["param"] in {"n", "prompt"}
    assert "at most 5 are allowed" in (await call()).text
    current.put(by(limits={"max_body_bytes": 1024, "max_header_bytes": 1024}))
    assert (await call(prompt="a" * 2000)).status_code == 413
    assert (await call("k" * 2000)).status_code == 431


async def test_the_document_has_the_present_bounds_and_says_whether_keys_are_asked_for(
    call: Any, current: CurrentSettings
) -> None:
    async def described() -> tuple[int, bool]:
        document = (await call.client.get("/openapi.json")).json()
        operation = document["paths"]["/v1/images/generations"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        [bound] = [one["maximum"] for one in schema["properties"]["n"]["anyOf"] if "maximum" in one]
        return bound, "security" in operation

    current.put(by(limits={"max_images_per_request": 7}))
    assert await described() == (7, True)
    current.put(by(http={}, limits={"max_images_per_request": 3}))
    assert await described() == (3, False)


async def test_defaults_of_a_model_follow(
    call: Any, current: CurrentSettings, fake: FakeDispatcherClient
) -> None:
    pool = {"name": "shapes", "model": "shapes-sd"}
    current.put(by(pools=[pool | {"defaults": {"num_inference_steps": 3, "size": "96x64"}}]))
    await call()
    assert (fake.offered[-1][0].num_steps, fake.offered[-1][0].width_px) == (3, 96)
    card = (await call.client.get("/v1/models/shapes", headers=header("one"))).json()
    assert card["default_size"] == "96x64"
    current.put(by(pools=[pool]))
    await call()
    assert fake.offered[-1][0].num_steps == 10


async def test_a_table_of_fewer_steps_follows(call: Any, current: CurrentSettings) -> None:
    current.put(by())
    fields = {"num_inference_steps": 20, "fidelity": "fast", "guidance_scale": 2.0}
    assert (await call(**fields)).json()["error"]["code"] == "fidelity_not_offered"
    steps = [{"asked": 20, "balanced": 8, "fast": 5}]
    table = {"sampler": "ddim", "max_guidance_scale": 2.0, "steps": steps}
    current.put(by(pools=[{"name": "shapes", "model": "shapes-sd", "fidelity": table}]))
    [image] = (await call(**fields)).json()["data"]
    assert image["num_inference_steps"] == 5


async def test_steps_without_loras_follow_and_replies_say_them(
    fake: FakeDispatcherClient, call: Any, current: CurrentSettings
) -> None:
    fake.registry.put(ready_lora("pastel"))
    current.put(by())
    fields: dict[str, Any] = {
        "fidelity": "balanced",
        "num_inference_steps": 20,
        "loras": [{"name": "pastel"}],
    }
    assert (await call(**fields)).json()["error"]["code"] == "fidelity_not_offered"
    pool = {"name": "shapes", "model": "shapes-sd", "lora_start": {"balanced": 0.15}}
    current.put(by(pools=[pool]))
    [image] = (await call(**fields)).json()["data"]
    assert (image["num_inference_steps"], image["lora_start_step"]) == (20, 3)
    assert fake.offered[-1][0].add_ons.lora_start_step == 3
    refused = await call(**{**fields, "fidelity": "fast"})
    assert refused.json()["error"]["code"] == "fidelity_not_offered"
    [image] = (await call(loras=fields["loras"])).json()["data"]
    assert "lora_start_step" not in image


async def test_a_gateway_stays_ready_while_a_new_model_loads(
    call: Any, current: CurrentSettings
) -> None:
    current.put(by())
    assert (await call.client.get("/readyz")).json()["warnings"] == []
    pools = [{"name": "shapes", "model": "shapes-sd"}, {"name": "new", "model": "shapes-sd"}]
    current.put(by(pools=pools))
    ready = await call.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["warnings"] == ["no replica of new has registered yet"]
    assert (await call(model="new")).status_code == 503
    assert (await call()).status_code == 200


async def test_a_model_that_nobody_deployed_is_not_said_to_load(
    call: Any, current: CurrentSettings, fake: FakeDispatcherClient
) -> None:
    pool = {"name": "shapes", "model": "shapes-sd"}
    pools = [pool, {"name": "new", "model": "shapes-sd"}]
    fake.undeployed_models = ("new",)
    current.put(by(pools=[pool]))
    current.put(by(pools=pools))
    reply = await call(model="new")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (503, "model_not_ready")
    assert error["message"] == (
        "The model 'new' is in the settings but not deployed: run 'ray-cluster settings apply "
        "FILE' with the service's configuration."
    )
    assert (await call.client.get("/readyz")).json()["warnings"] == []


async def test_a_gateway_that_starts_later_says_that_a_model_is_not_deployed(
    call: Any, current: CurrentSettings, fake: FakeDispatcherClient
) -> None:
    current.put(by(pools=[{"name": name, "model": "shapes-sd"} for name in ("shapes", "new")]))
    fake.undeployed_models = ("new",)
    # one wrong pool does not take the others down
    ready = await call.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["warnings"] == []
    fake.profiles.clear()
    fake.undeployed_models = ("shapes", "new")
    ready = await call.client.get("/readyz")
    assert ready.status_code == 503
    assert "shapes, new are in the settings but not deployed" in ready.text
    assert "no replica" not in ready.text


async def test_a_removed_model_is_unknown_at_once_and_no_404_offers_it(
    call: Any, current: CurrentSettings, fake: FakeDispatcherClient
) -> None:
    old = {"name": "old", "model": "shapes-sd"}
    pool = {"name": "shapes", "model": "shapes-sd"}
    fake.profiles["old"] = replace(shapes_profile(), model="old")
    current.put(by(pools=[pool, old]))
    assert (await call(model="old")).status_code == 200
    # the catalog has its profile yet, and the dispatcher's next answer may still name it
    current.put(by(pools=[pool]))
    for model in ("old", "nothing"):
        reply = await call(model=model)
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == (
            f"The model {model!r} does not exist; allowed: shapes (taken where 'model' is left "
            "out)."
        )
    cards = (await call.client.get("/v1/models", headers=header("one"))).json()["data"]
    assert [card["id"] for card in cards] == ["shapes"]
    current.put(by(pools=[pool, old]))
    assert (await call(model="old")).status_code == 200


async def test_a_model_that_the_dispatcher_knows_to_be_removed_is_not_offered_instead(
    call: Any, current: CurrentSettings, fake: FakeDispatcherClient
) -> None:
    pools = [{"name": name, "model": "shapes-sd"} for name in ("shapes", "old")]
    fake.profiles["old"] = replace(shapes_profile(), model="old")
    # the dispatcher has newer settings than this gateway
    current.put(by(pools=pools))
    fake.offers = [Offer(accepted=False, reason="unknown_model")]
    reply = await call(model="old")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"].endswith(
        "allowed: shapes (taken where 'model' is left out)."
    )


async def test_the_feed_keeps_what_it_has_while_there_is_no_dispatcher(
    current: CurrentSettings, fake: FakeDispatcherClient
) -> None:
    feed = SettingsFeed(fake, current)
    first, second = by(), by(limits={"max_queued_images": 7})
    fake.down = True
    starting = asyncio.create_task(feed.start())
    await asyncio.sleep(0.05)
    assert not starting.done(), "a gateway that knows nothing does not begin to serve"
    fake.down = False
    fake.news.put_nowait(first)
    await starting
    assert current.version == first.version
    fake.down = True
    fake.news.put_nowait(second)
    await until(lambda: current.version == second.version)
    await asyncio.sleep(0.05)
    assert current.version == second.version
    feed.check_alive()
    fake.down = False
    await until(lambda: second.version in fake.seen_versions)
    feed.stop()


async def test_keys_do_not_travel(current: CurrentSettings) -> None:
    assert "very-secret" not in repr(by(http={"api_keys": ["very-secret"]}))


async def test_what_stands_in_front_changes_while_it_runs(
    call: Any, current: CurrentSettings
) -> None:
    page = {"Origin": "https://app.example.com", **header("one")}
    for public_url, origins in (("https://a.example", ()), (None, (page["Origin"],))):
        current.put(
            by(http={"api_keys": ["one"], "public_url": public_url, "cors_origins": origins})
        )
        reply = await call.client.post(
            "/v1/images/generations", json={**CALL, "response_format": "url"}, headers=page
        )
        base = public_url or "http://gateway"
        assert reply.json()["data"][0]["url"].startswith(f"{base}/v1/files/")
        assert ("access-control-allow-origin" in reply.headers) is bool(origins)
