"""Each LoRA as a model of its own: ``BASE:NAME`` in calls and in the list of models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.output.resource_schemas import LoraModelCard, ModelList
from ray_cluster.api.routes.models import ModelsEndpoint
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.protocol.loras import LoraStatus
from ray_cluster.requests import ImageRequest
from tests.api.checks import URL, check_error, refused
from tests.api.conftest import shapes_config, shapes_profile
from tests.fake_loras import ADDED_S, FakeLoras, ready_lora
from tests.fakes import FakeDispatcherClient, model_profile

RED = {"prompt": "a red circle"}


@pytest.fixture
def fake() -> FakeDispatcherClient:
    one = FakeDispatcherClient(
        shapes_profile(),
        *(replace(shapes_profile(), model=name) for name in ("other", "org/a:b", "light", "heavy")),
    )
    one.registry.put(
        ready_lora("pastel"),
        ready_lora("outline"),
        ready_lora("inks", "other"),
        ready_lora("strong", "heavy"),
        ready_lora("weak", "light"),
        ready_lora("c", "org/a:b"),
        ready_lora("b", "org/a"),
    )
    return one


@pytest.fixture
def config() -> ClusterConfig:
    """Beside the usual pools, a cascade."""
    pools = [{"name": name, "model": "shapes-sd"} for name in ("light", "heavy")]
    cascade = {"name": "auto", "light": "light", "heavy": "heavy", "discriminator": "judge"}
    usual = shapes_config().model_dump(exclude_unset=True)
    return ClusterConfig.model_validate(
        {
            **usual,
            "pools": [*usual["pools"], *pools],
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [{**cascade, "threshold": 0.5}],
        }
    )


async def made(http: httpx.AsyncClient, fake: FakeDispatcherClient, **body: Any) -> ImageRequest:
    """The request that a call becomes."""
    response = await http.post(URL, json={**RED, **body})
    assert response.status_code == 200, response.text
    return fake.offered[-1][0]


def scales(request: ImageRequest) -> dict[str, float]:
    return {one.name: one.scale for one in request.add_ons.loras}


async def test_a_models_name_may_name_a_lora(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    request = await made(http, fake, model="shapes:pastel")
    # one queue per base
    assert (request.model, request.called_model) == ("shapes", "shapes")
    assert scales(request) == {"pastel": 1.0}
    more = [{"name": "outline", "scale": -0.5}]
    request = await made(http, fake, model="shapes:pastel", loras=more)
    assert scales(request) == {"pastel": 1.0, "outline": -0.5}
    again = [{"name": "pastel", "scale": 0.5}]
    assert "'model' names, too" in await refused(
        http, "loras", **RED, model="shapes:pastel", loras=again
    )
    eight = [{"name": f"l{index}"} for index in range(8)]
    assert "9 LoRAs" in await refused(http, "loras", **RED, model="shapes:pastel", loras=eight)


async def test_a_model_that_has_a_colon_in_its_own_name_wins(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    request = await made(http, fake, model="org/a:b")
    assert (request.model, scales(request)) == ("org/a:b", {})
    request = await made(http, fake, model="org/a:b:c")
    assert (request.model, scales(request)) == ("org/a:b", {"c": 1.0})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("shapes:pastell", "there is no LoRA 'pastell'. Did you mean 'shapes:pastel'?"),
        ("other:pastel", "'pastel' is made for shapes. Did you mean 'shapes:pastel'?"),
        ("nothing:pastel", "allowed: shapes (taken where 'model' is left out)"),
        ("shapes:", "'shapes:' does not exist"),
        ("shapes:a b", "'shapes:a b' does not exist"),
        (":pastel", "':pastel' does not exist"),
        (":", "':' does not exist"),
    ],
)
async def test_a_model_that_there_is_not_is_not_found(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, model: str, said: str
) -> None:
    reply = await http.post(URL, json={**RED, "model": model})
    check_error(reply, 404, code="model_not_found", param="model")
    assert said in reply.json()["error"]["message"]
    assert fake.offered == []


async def test_a_base_that_is_not_ready_is_waited_for_by_the_client(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.registry.put(ready_lora("new", "late"))
    reply = await http.post(URL, json={**RED, "model": "late:new"})
    check_error(reply, 503, code="model_not_ready")


async def test_a_cascade_with_loras_goes_to_the_model_that_they_are_made_for(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    strong, weak = [{"name": "strong", "scale": 0.5}], [{"name": "weak"}]
    for body in ({"model": "auto", "loras": strong}, {"model": "auto:strong"}):
        request = await made(http, fake, **body)
        use = request.cascade
        assert use is not None
        assert (request.model, use.name, use.entry) == ("heavy", "auto", "heavy")
        assert (use.light, use.reason) == (None, "add_ons")
        assert [*scales(request)] == ["strong"]
    request = await made(http, fake, model="auto", quality="high", loras=strong)
    assert request.cascade is not None
    assert request.cascade.reason == "quality"
    assert "made for light" in await refused(http, "loras", **RED, model="auto", loras=weak)
    low = {**RED, "model": "auto", "quality": "low"}
    assert "made for heavy" in await refused(http, "loras", **low, loras=strong)
    request = await made(http, fake, model="auto", quality="low", loras=weak)
    assert (request.model, scales(request)) == ("light", {"weak": 1.0})


async def test_models_are_listed_with_their_loras(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.registry.put(
        ready_lora("broken", state="failed", reason="no"),
        ready_lora("leaving", state="removing"),
        ready_lora("early", "late"),
    )
    body = (await http.get("/v1/models")).json()
    listed = ModelList.model_validate(body, strict=True, extra="forbid").data
    cards = {one.id: one for one in listed}
    assert [one.id for one in listed if isinstance(one, LoraModelCard)] == [
        "org/a:b:c",
        "other:inks",
        "shapes:outline",
        "shapes:pastel",
        "heavy:strong",
        "light:weak",
    ]
    one = cards["shapes:pastel"]
    assert isinstance(one, LoraModelCard)
    assert (one.parent, one.created, one.owned_by) == ("shapes", ADDED_S, "ray-cluster")
    alone = (await http.get("/v1/models/shapes:pastel")).json()
    assert LoraModelCard.model_validate(alone) == one
    for name in ("shapes:broken", "shapes:leaving", "shapes:inks", "nothing:pastel", "shapes:x"):
        check_error(await http.get(f"/v1/models/{name}"), 404, code="model_not_found")
    assert (await http.get("/v1/models/org/a:b")).json()["family"] == "sd"
    num_calls = fake.registry.num_calls
    for name in ("shapes:", f"shapes:{'x' * 65}", "x" * 65):
        check_error(await http.get(f"/v1/models/{name}"), 404, code="model_not_found")
    # none of these can be a LoRA's
    assert fake.registry.num_calls == num_calls


async def test_ten_thousand_loras_are_listed_in_a_few_calls(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles = {"shapes": model_profile("shapes")}
    fake.registry.put(*(ready_lora(f"l{index:05}") for index in range(10_000)))
    before = fake.registry.num_calls
    reply = await http.get("/v1/models")
    assert len(reply.json()["data"]) == 10_003
    # each of them short
    assert fake.registry.num_calls - before <= 41
    assert len(reply.content) < 2_000_000


class SlowLoras(FakeLoras):
    """Lets others run in every call."""

    async def loras(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        await asyncio.sleep(0)
        return await super().loras(after, limit)


async def test_who_lists_models_while_others_do_shares_the_next_reading() -> None:
    loras = SlowLoras()
    loras.put(*(ready_lora(f"l{index:04}") for index in range(999)))
    endpoint = ModelsEndpoint(cast(Catalog, None), loras)
    first = asyncio.create_task(endpoint._usable())
    for _ in range(3):
        await asyncio.sleep(0)
    assert loras.num_calls
    # what is registered while one reads is in the list of who asks later
    loras.put(ready_lora("a-new-one"))
    others = [asyncio.create_task(endpoint._usable()) for _ in range(5)]
    others[0].cancel()
    assert len(await first) == 999
    assert [len(await one) for one in others[1:]] == [1000] * 4
    assert loras.num_calls == 4 + 5
