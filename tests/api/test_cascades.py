"""Calls that name a cascade: which model makes the image, and what the reply says of it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.protocol.outcomes import CascadeAnswer, Completed, StageTime
from ray_cluster.requests import ImageRequest, LightStage, ModelProfile
from tests.api.checks import URL, check_error
from tests.api.conftest import NOW_S, Serve, http_of
from tests.fakes import (
    FakeDispatcherClient,
    completed,
    model_profile,
    registration,
    sent_images,
    settings_for,
)
from tests.jobs.jobs_cell import JobsCell, Replica, until

TIMES = (StageTime("light", "light", 0.1, 0.5), StageTime("score", "judge", 0.01, 0.02))


@pytest.fixture
def config() -> ClusterConfig:
    """A cascade beside its two models."""
    pools = [{"name": name, "model": "shapes-sd"} for name in ("heavy", "light")]
    cascade = {"name": "auto", "light": "light", "heavy": "heavy", "discriminator": "judge"}
    return ClusterConfig.model_validate(
        {
            "pools": pools,
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [{**cascade, "threshold": 0.5}],
        }
    )


def profiles() -> tuple[ModelProfile, ModelProfile]:
    """A heavy model, and a light one that is quick, small and not guided."""
    light = replace(
        model_profile("light"),
        max_px=128,
        default_num_steps=2,
        default_guidance_scale=1.0,
        default_width_px=32,
        guidance="none",
        default_sampler="lcm",
        max_steps_by_sampler={"lcm": 8},
    )
    return model_profile("heavy"), light


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return FakeDispatcherClient(*profiles())


def answered(request: ImageRequest, *, is_light: bool) -> Completed:
    """The end of a routed request."""
    stage = "light" if is_light else "heavy"
    reason = "confident" if is_light else "deferred"
    answer = CascadeAnswer("auto", stage, stage, reason, 0.75, 0.5, TIMES)  # type: ignore[arg-type]
    num_steps = 2 if is_light else request.num_steps
    return replace(completed(request), cascade=answer, num_steps=num_steps)


async def asked(http: httpx.AsyncClient, fake: FakeDispatcherClient, **body: Any) -> ImageRequest:
    """The request that a call of the cascade becomes."""
    response = await http.post(URL, json={"model": "auto", "prompt": "a red circle", **body})
    assert response.status_code == 200, response.text
    [request] = fake.offered[-1]
    assert request.called_model == "auto"
    return request


async def test_a_call_is_sampled_as_it_says_by_the_heavy_model_and_as_usual_by_the_light_one(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    more = {"num_inference_steps": 30, "guidance_scale": 4.0, "sampler": "ddim", "seed": 3}
    request = await asked(http, fake, negative_prompt="", **more)
    assert request.cascade is not None
    assert (request.model, request.num_steps, request.guidance_scale) == ("heavy", 30, 4.0)
    assert request.cascade.light == LightStage("light", "judge", 2, 1.0, "lcm")
    light = request.light
    assert light is not None
    # the size is the heavy model's where the call leaves it open
    assert (light.model, light.size_px, light.seed) == ("light", (64, 64), 3)
    assert light.recipe()["cascade"] == request.recipe()["cascade"] == "auto"


@pytest.mark.parametrize(
    ("body", "model", "entry", "reason"),
    [
        ({"quality": "low"}, "light", "light", "quality"),
        ({"quality": "high"}, "heavy", "heavy", "quality"),
        ({"quality": "hd"}, "heavy", "heavy", "quality"),
        ({"size": "256x64"}, "heavy", "heavy", "size"),
        ({"negative_prompt": "blue"}, "heavy", "heavy", "negative_prompt"),
    ],
)
async def test_what_is_not_routed_is_made_by_one_model_alone(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    body: dict[str, Any],
    model: str,
    entry: str,
    reason: str,
) -> None:
    request = await asked(http, fake, **body)
    use = request.cascade
    assert use is not None
    assert (request.model, use.light, use.entry, use.reason) == (model, None, entry, reason)


async def test_a_call_may_require_the_heavy_model(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    for body, wanted in (({}, False), ({"require": None}, False), ({"require": "heavy"}, True)):
        request = await asked(http, fake, **body)
        assert request.cascade is not None
        assert request.cascade.light is not None
        assert request.cascade.requires_heavy is wanted
    # where it alone makes the image, there is nothing to require
    assert (await asked(http, fake, require="heavy", quality="high")).light is None
    for more in ({"model": "heavy"}, {"model": "auto", "quality": "low"}):
        reply = await http.post(URL, json={"prompt": "x", "require": "heavy"} | more)
        check_error(reply, 400, param="require")
    other = {"model": "auto", "prompt": "x", "require": "light"}
    check_error(await http.post(URL, json=other), 400, param="require")


@pytest.mark.parametrize("quality", ["medium", "standard", "auto", None])
async def test_other_qualities_are_routed(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, quality: str | None
) -> None:
    request = await asked(http, fake, quality=quality)
    assert request.light is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"size": "512x512"}, "size"),
        ({"num_inference_steps": 500}, "num_inference_steps"),
        ({"quality": "low", "negative_prompt": "blue"}, "negative_prompt"),
        ({"quality": "low", "size": "256x64"}, "size"),
        ({"prompt": " "}, "prompt"),
    ],
)
async def test_what_the_model_that_answers_does_not_take_is_refused(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await http.post(URL, json={"model": "auto", "prompt": "a red circle", **body})
    check_error(response, 400, param=param)


@pytest.mark.parametrize("is_light", [True, False])
def test_the_official_client_sees_which_model_answered(
    app: FastAPI, serve: Serve, fake: FakeDispatcherClient, *, is_light: bool
) -> None:
    fake.outcome = lambda request: answered(request, is_light=is_light)
    client = openai.OpenAI(base_url=f"{serve(app)}/v1", api_key="any", timeout=60)
    reply = client.images.generate(model="auto", prompt="a red circle", quality="medium")
    assert reply.data is not None
    assert reply.model_extra is not None
    assert reply.model_extra["model"] == "auto"
    details = reply.data[0].model_extra
    assert details is not None
    assert details["num_inference_steps"] == (2 if is_light else 10)
    stage = "light" if is_light else "heavy"
    assert details["cascade"] == {
        "model": stage,
        "stage": stage,
        "reason": "confident" if is_light else "deferred",
        "confidence": 0.75,
        "threshold": 0.5,
        "stages": [
            {"stage": "light", "name": "light", "queue_s": 0.1, "took_s": 0.5},
            {"stage": "score", "name": "judge", "queue_s": 0.01, "took_s": 0.02},
        ],
    }
    assert {model.id for model in client.models.list()} == {"heavy", "light", "auto"}
    card = client.models.retrieve("auto").model_extra
    assert card is not None
    assert (card["family"], card["max_px"]) == ("cascade", 256)
    assert card["cascade"] == {"light": "light", "heavy": "heavy", "discriminator": "judge"}


async def test_a_lora_is_registered_for_a_model_and_not_for_a_cascade(
    http: httpx.AsyncClient,
) -> None:
    body = {"name": "mine", "base": "auto", "source": "builtin:pastel"}
    reply = await http.post("/v1/loras", json=body)
    check_error(reply, 400, param="base")
    assert "for one of its models" in reply.json()["error"]["message"]


async def test_the_quality_that_counted_is_in_the_reply(http: httpx.AsyncClient) -> None:
    for given, used in (("low", "low"), ("hd", "high"), ("medium", "auto")):
        body = {"model": "auto", "prompt": "a red circle", "quality": given}
        assert (await http.post(URL, json=body)).json()["quality"] == used


async def test_a_cascade_without_a_model_is_not_ready(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles = {"heavy": profiles()[0]}
    response = await http.post(URL, json={"model": "auto", "prompt": "a red circle"})
    check_error(response, 503, code="model_not_ready")
    assert "light" in response.json()["error"]["message"]
    check_error(await http.get("/v1/models/auto"), 503)


@pytest.fixture
async def workers(cell: JobsCell) -> dict[str, Replica]:
    """A light replica, a discriminator and a heavy one in the cell."""
    heavy, light = profiles()
    found = {}
    for name, changes in {
        "light": {"profile": light},
        "heavy": {"profile": heavy},
        "judge": {"profile": None, "kind": "score", "served_as": "judge"},
    }.items():
        found[name] = Replica(cell, name, name)
        one = replace(registration(name, name), **changes)
        found[name].epoch = await cell.dispatch.register(one)
    return found


@pytest.fixture
async def cell_http(
    cell: JobsCell, config: ClusterConfig, workers: dict[str, Replica]
) -> AsyncIterator[httpx.AsyncClient]:
    assert workers
    cell.core.apply(settings_of(config), time.monotonic())
    app = create_app(
        cell, settings_for(config), clock=lambda: NOW_S, results=cell.results, images=sent_images()
    )  # type: ignore[arg-type]
    async with http_of(app) as http:
        yield http


async def to_the_heavy_stage(workers: dict[str, Replica]) -> None:
    await until_leased(workers["light"])
    await workers["light"].finish(*workers["light"].leases.values(), b"light")
    await until_leased(workers["judge"])
    await workers["judge"].score(*workers["judge"].leases.values(), 0.25)
    await until_leased(workers["heavy"])


async def turns() -> None:
    """Let whoever was woken do what they were woken for: a stream shows only the last preview."""
    for _ in range(100):
        await asyncio.sleep(0)


async def until_leased(replica: Replica) -> None:
    end_s = time.monotonic() + 60.0
    while not await replica.poll():
        assert time.monotonic() < end_s, "nothing was leased"


async def test_a_stream_shows_the_light_image_first_and_then_the_heavy_one(
    cell_http: httpx.AsyncClient, workers: dict[str, Replica]
) -> None:
    body = {"model": "auto", "prompt": "a red circle", "stream": True, "partial_images": 2}
    calling = asyncio.create_task(cell_http.post(URL, json=body))
    await to_the_heavy_stage(workers)
    [lease] = workers["heavy"].leases.values()
    await turns()
    await workers["heavy"].show(lease, 0)
    await turns()
    await workers["heavy"].finish(lease, b"heavy")
    text = (await calling).text
    events = [one for one in text.split("\n\n") if one.startswith("event: ")]
    assert [one.split("\n")[0].rpartition(".")[2] for one in events][-1] == "completed"
    assert base64.b64encode(b"light").decode() in events[0]
    assert '"partial_image_index": 0' in events[0]
    assert base64.b64encode(b"heavy").decode() in events[-1]
    assert '"reason": "deferred"' in events[-1]
    assert '"confidence": 0.25' in events[-1]


async def test_a_job_shows_its_stages_and_its_answer(
    cell_http: httpx.AsyncClient, workers: dict[str, Replica], cell: JobsCell, tmp_path: Path
) -> None:
    created = await cell_http.post("/v1/jobs", json={"model": "auto", "prompt": "a red circle"})
    assert created.status_code == 202, created.text
    assert (created.json()["model"], created.json()["cascade_stages"]) == ("auto", ["light"])
    job = f"/v1/jobs/{created.json()['id']}"
    await to_the_heavy_stage(workers)
    assert (await cell_http.get(job)).json()["cascade_stages"] == ["heavy"]
    await workers["heavy"].finish(*workers["heavy"].leases.values(), b"heavy")
    # written first, and ended in the dispatcher's memory after that
    await until(lambda: not cell.store.unfinished())
    done = (await cell_http.get(job)).json()
    while done["state"] != "completed":
        await asyncio.sleep(0.005)
        done = (await cell_http.get(job)).json()
    [image] = done["data"]
    assert (done["state"], done["cascade_stages"]) == ("completed", [])
    assert (image["cascade"]["stage"], image["cascade"]["confidence"]) == ("heavy", 0.25)
    assert [one["stage"] for one in image["cascade"]["stages"]] == ["light", "score", "heavy"]
    assert (await cell_http.get(httpx.URL(image["url"]).path)).content == b"heavy"
    assert (tmp_path / "jobs.db").exists()
