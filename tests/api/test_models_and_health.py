from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from ray_cluster.api.output.resource_schemas import ModelCard, ModelList
from ray_cluster.api.routes import health
from ray_cluster.requests import ModelProfile
from tests.api.checks import URL, error_of
from tests.api.conftest import shapes_profile
from tests.fakes import FakeDispatcherClient


async def test_models_lists_what_is_registered(http: httpx.AsyncClient) -> None:
    body = (await http.get("/v1/models")).json()
    listed = ModelList.model_validate(body, strict=True, extra="forbid")
    assert [model.id for model in listed.data] == ["shapes"]
    one = (await http.get("/v1/models/shapes")).json()
    assert ModelCard.model_validate(one) == listed.data[0]
    assert one["max_steps_by_sampler"] == {"ddim": 100, "euler": 100, "lcm": 50}
    assert one["default_size"] == "64x64"


async def test_a_model_may_have_a_slash_in_its_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles["org/model"] = replace(shapes_profile(), model="org/model")
    assert (await http.get("/v1/models/org/model")).json()["id"] == "org/model"


async def test_a_configured_model_that_has_not_registered_is_not_ready(
    http: httpx.AsyncClient,
) -> None:
    response = await http.get("/v1/models/late")
    assert response.status_code == 503
    assert error_of(response)["code"] == "model_not_ready"


async def test_liveness_does_not_depend_on_the_dispatcher(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.down = True
    assert (await http.get("/healthz")).json() == {"status": "ok"}


async def test_ready_means_that_every_configured_model_is_registered(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert "no replica of late" in error_of(response)["message"]
    fake.profiles["late"] = replace(shapes_profile(), model="late")
    response = await http.get("/readyz")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "models": ["shapes", "late"], "warnings": []}
    fake.down = True
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert "dispatcher" in error_of(response)["message"]


async def test_a_dispatcher_that_hangs_is_not_ready(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> dict[str, ModelProfile]:
        await asyncio.sleep(30)
        return {}

    monkeypatch.setattr(fake, "models", hang)
    monkeypatch.setattr(health, "ANSWER_TIMEOUT_S", 0.05)
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert "0.05 s" in error_of(response)["message"]


async def test_calls_at_the_same_time_share_one_question_to_the_dispatcher(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    async def slow() -> dict[str, ModelProfile]:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0.05)
        return fake.profiles

    monkeypatch.setattr(fake, "models", slow)
    first, *others = [asyncio.create_task(http.get("/v1/models/shapes")) for _ in range(5)]
    await asyncio.sleep(0.02)
    first.cancel()
    assert [(await other).status_code for other in others] == [200] * 4
    assert num_asked == 1


async def test_the_openapi_document_describes_the_images_call(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    call = document["paths"][URL]["post"]
    content = call["requestBody"]["content"]["application/json"]
    assert content["schema"]["additionalProperties"] is False
    assert content["schema"]["required"] == ["prompt"]
    assert "(extension)" in content["schema"]["properties"]["slo_s"]["description"]
    assert all(field.get("description") for field in content["schema"]["properties"].values())
    assert {"200", "400", "401", "404", "413", "415", "429", "500", "503"} <= call[
        "responses"
    ].keys()
    for example in content["examples"].values():
        response = await http.post(URL, json={**example["value"], "model": "shapes"})
        assert response.status_code == 200, response.text


async def test_every_reference_in_the_openapi_document_leads_somewhere(
    http: httpx.AsyncClient,
) -> None:
    text = (await http.get("/openapi.json")).text
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    named = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= schemas.keys()
    assert {"ImagesResponse", "ErrorResponse"} <= named
    assert "HTTPValidationError" not in schemas


async def test_ready_shows_no_path_of_the_server(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def warnings() -> tuple[str, ...]:
        return (
            "refused: /etc/ray-cluster/my.yaml: no file '/etc/ray-cluster/my.yaml'",
            "storage.jobs (sqlite:////var/lib/jobs.db) and storage.results (/results), s3://a/b/c",
            "pool p: org/model at 127.0.0.1:80/v1, 3 / 4 images/s",
        )

    fake.profiles["late"] = replace(shapes_profile(), model="late")
    monkeypatch.setattr(fake, "warnings", warnings)
    assert (await http.get("/readyz")).json()["warnings"] == [
        "refused: my.yaml: no file 'my.yaml'",
        "storage.jobs (sqlite:///jobs.db) and storage.results (results), s3://a/b/c",
        "pool p: org/model at 127.0.0.1:80/v1, 3 / 4 images/s",
    ]
