"""The registry of LoRAs over HTTP, and calls that name LoRAs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.output.resource_schemas import LoraList, LoraResponse
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.keys import KeyConfig
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.protocol.loras import LoraAdded
from ray_cluster.requests import LoraUse
from tests.api.checks import URL, check_error, refused
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.api.edit_calls import EDITS, IMAGE, MASK, VARIATIONS, coded, post_form
from tests.api.test_jobs import ended
from tests.fake_loras import ADDED_S, ready_lora
from tests.fakes import FakeDispatcherClient, memory_results, sent_images, settings_for
from tests.jobs.jobs_cell import Replica
from tests.keys import bearer, with_keys

LORAS = "/v1/loras"
RED = {"prompt": "a red circle"}
PASTEL = {"name": "pastel", "base": "shapes", "source": "builtin:pastel"}
TWO = [{"name": "pastel", "scale": 0.8}, {"name": "outline"}]


@pytest.fixture
def fake() -> FakeDispatcherClient:
    """A dispatcher with two LoRAs of one model and one of another."""
    one = FakeDispatcherClient(shapes_profile(), replace(shapes_profile(), model="other"))
    one.registry.put(ready_lora("pastel"), ready_lora("outline"), ready_lora("inks", "other"))
    return one


# the registry


async def test_a_base_that_is_run_call_by_call_is_refused(config: ClusterConfig) -> None:
    called = replace(shapes_profile(), engine="diffusers")
    fake = FakeDispatcherClient(called)
    # as the configuration may register it
    fake.registry.put(ready_lora("outline"))
    async with http_of(app_of(fake, config)) as http:
        reply = await http.post(LORAS, json=PASTEL)
        check_error(reply, 400, code="invalid_value", param="base")
        assert "names shapes, which is run call by call" in reply.text
        for fields in ({"loras": [{"name": "outline"}]}, {"model": "shapes:outline"}):
            assert "run call by call" in await refused(http, "loras", **RED, **fields)


async def test_a_lora_is_registered_once(http: httpx.AsyncClient) -> None:
    wanted = {**PASTEL, "name": "mine", "pinned": True, "sha256": "0f" * 32}
    first = await http.post(LORAS, json=wanted)
    assert first.status_code == 201, first.text
    assert first.headers["location"] == "http://gateway/v1/loras/mine"
    assert first.json() == {
        "id": "mine",
        "object": "lora",
        "name": "mine",
        "base": "shapes",
        "model": "shapes:mine",
        "source": "builtin:pastel",
        "sha256": "0f" * 32,
        "pinned": True,
        "created": ADDED_S,
        "state": "registered",
        "error": None,
        "is_permanent": False,
        **dict.fromkeys(("num_bytes", "ranks", "num_layers", "changes_prompts")),
        "num_uses": 0,
        "nodes": [],
    }
    again = await http.post(LORAS, json=wanted)
    assert (again.status_code, again.json()) == (200, first.json())
    for name, value in {"source": "builtin:outline", "base": "other", "pinned": False}.items():
        other = await http.post(LORAS, json={**wanted, name: value})
        check_error(other, 409, code="lora_exists", param="name")
        assert f"with another {name}" in other.json()["error"]["message"]


async def test_a_lora_is_shown_with_what_is_known_of_it(http: httpx.AsyncClient) -> None:
    card = (await http.get(f"{LORAS}/pastel")).json()
    LoraResponse.model_validate(card, strict=True, extra="forbid")
    assert (card["state"], card["num_bytes"], card["ranks"]) == ("ready", 2_500_000, [4, 8])
    assert (card["num_uses"], card["nodes"], card["sha256"]) == (3, ["node-1"], "ab" * 32)
    for call in (http.get, http.delete):
        reply = await call(f"{LORAS}/nothing")
        check_error(reply, 404, code="lora_not_found", param="name")
    for name in ("pastell", "%20", "a:b", "x" * 65):
        check_error(await http.get(f"{LORAS}/{name}"), 404, code="lora_not_found")
    assert "'pastel'" in (await http.get(f"{LORAS}/pastell")).json()["error"]["message"]


async def test_a_failed_lora_tells_why(http: httpx.AsyncClient, fake: FakeDispatcherClient) -> None:
    bad = ready_lora("bad", state="failed", facts=None, reason="is DoRA", is_permanent=True)
    fake.registry.put(bad)
    card = (await http.get(f"{LORAS}/bad")).json()
    assert (card["state"], card["error"], card["is_permanent"]) == ("failed", "is DoRA", True)
    message = await refused(http, "loras", **RED, loras=[{"name": "bad"}])
    assert "is DoRA" in message
    assert fake.offered == []
    # the source may answer another time: its request waits for that
    fake.registry.put(replace(bad, is_permanent=False))
    assert (await http.post(URL, json={**RED, "loras": [{"name": "bad"}]})).status_code == 200


async def test_loras_are_listed_by_name_in_pages(http: httpx.AsyncClient) -> None:
    whole = (await http.get(LORAS)).json()
    LoraList.model_validate(whole, strict=True, extra="forbid")
    assert [one["name"] for one in whole["data"]] == ["inks", "outline", "pastel"]
    assert whole["has_more"] is False
    first = (await http.get(LORAS, params={"limit": 2})).json()
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("inks", "outline", True)
    rest = (await http.get(LORAS, params={"limit": 2, "after": first["last_id"]})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (["pastel"], False)
    empty = (await http.get(LORAS, params={"after": "z"})).json()
    assert (empty["data"], empty["first_id"]) == ([], None)
    for query in ("limit=0", "limit=1001", "limit=x", "page=2", "limit=1&limit=2"):
        check_error(await http.get(f"{LORAS}?{query}"), 400)


async def test_a_removed_lora_is_not_offered_any_more(http: httpx.AsyncClient) -> None:
    removed = await http.delete(f"{LORAS}/pastel")
    assert (removed.status_code, removed.json()["state"]) == (200, "removing")
    check_error(await http.delete(f"{LORAS}/pastel"), 404)
    message = await refused(http, "loras", **RED, loras=[{"name": "pastel"}])
    assert "does not exist" in message


async def test_one_that_is_being_removed_is_as_if_it_was_not_there(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.registry.put(ready_lora("pastel", state="removing"))
    await refused(http, "loras", **RED, loras=[{"name": "pastel"}])
    assert (await http.get(f"{LORAS}/pastel")).json()["state"] == "removing"


@pytest.mark.parametrize(
    ("changes", "status", "param", "said"),
    [
        ({"name": None}, 400, "name", "is required; say how calls are to choose it"),
        ({"name": "a b"}, 400, "name", "1 to 64 letters, digits"),
        ({"name": "a:b"}, 400, "name", "1 to 64 letters, digits"),
        ({"name": "x" * 65}, 400, "name", "1 to 64 letters, digits"),
        ({"name": 7}, 400, "name", "1 to 64 letters, digits"),
        ({"base": "shapess"}, 404, "base", "allowed: shapes, late, other"),
        ({"base": None}, 400, "base", "is required"),
        ({"source": ""}, 400, "source", "not empty"),
        ({"source": "x" * 1001}, 400, "source", "at most 1000"),
        ({"source": "a\nb"}, 400, "source", "control characters"),
        ({"source": "https://me:pass@host/a.safetensors"}, 400, "source", "a password"),
        ({"source": "http://[a/b"}, 400, "source", "is no URL"),
        ({"sha256": "AB" * 32}, 400, "sha256", "64 hexadecimal digits"),
        ({"pinned": 1}, 400, "pinned", "true or false"),
        ({"scale": 1}, 400, "scale", "There are name, base, source, sha256, pinned"),
        ({"pined": True}, 400, "pined", "Did you mean 'pinned'?"),
    ],
)
async def test_a_wrong_registration_is_refused_by_name(
    http: httpx.AsyncClient, changes: dict[str, Any], status: int, param: str, said: str
) -> None:
    reply = await http.post(LORAS, json={**PASTEL, "name": "new", **changes})
    check_error(reply, status, param=param)
    assert said in reply.json()["error"]["message"]


async def test_a_full_registry_and_an_unknown_base_of_the_dispatcher(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles["none"] = replace(shapes_profile(), model="none")
    reply = await http.post(LORAS, json={**PASTEL, "name": "new", "base": "none"})
    check_error(reply, 404, code="model_not_found", param="base")
    fake.registry._max_loras = 3
    reply = await http.post(LORAS, json={**PASTEL, "name": "new"})
    check_error(reply, 409, code="too_many_loras")


@pytest.mark.parametrize(
    ("refused", "code", "said"),
    [
        ("too_many", "too_many_loras", "there are 5, as many as allowed (loras.max_loras)"),
        ("too_many_own", "too_many_loras", "you have 5, as many as allowed (loras.client_share of"),
        ("too_many_pinned", "too_many_pinned_loras", "allowed (loras.max_pinned)"),
        ("too_many_own_pinned", "too_many_pinned_loras", "you have 5, as many"),
    ],
)
async def test_who_has_too_many_hears_how_many_are_allowed(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, refused: Any, code: str, said: str
) -> None:
    fake.registry.refusal = LoraAdded(None, refused, "5")
    reply = await http.post(LORAS, json={**PASTEL, "name": "new", "pinned": True})
    check_error(reply, 409, code=code, param="pinned" if "pinned" in refused else None)
    assert said in reply.json()["error"]["message"]


async def test_a_signed_address_is_shown_to_nobody(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    source = "https://host/a.safetensors?token=SECRET"
    made = await http.post(LORAS, json={**PASTEL, "name": "signed", "source": source})
    replies = [made, await http.get(f"{LORAS}/signed"), await http.get(LORAS)]
    replies += [await http.post(LORAS, json={**PASTEL, "name": "signed"})]
    replies += [await http.delete(f"{LORAS}/signed")]
    assert [one.status_code for one in replies] == [201, 200, 200, 409, 200]
    assert not any("SECRET" in one.text for one in replies)
    assert made.json()["source"] == "https://host/a.safetensors?..."


async def test_a_lora_belongs_to_who_registered_it(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    settings = settings_for(with_keys(config, KeyConfig.of("alice", "right", ["loras"])))
    owners = []
    for app_settings, headers in ((settings, bearer("right")), (settings_for(config), {})):
        app = create_app(fake, app_settings, results=memory_results(), images=sent_images())
        async with http_of(app) as http:
            name = f"mine{len(owners)}"
            reply = await http.post(LORAS, json={**PASTEL, "name": name}, headers=headers)
            assert reply.status_code == 201
        owners.append((await fake.find_loras((name,))).found[name].lora.owner)
    assert owners == ["alice", "address 127.0.0.1"]


async def test_a_thousand_are_listed_in_calls_that_are_short(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.registry.put(*(ready_lora(f"l{index:05}") for index in range(1_500)))
    before = fake.registry.num_calls
    whole = (await http.get(LORAS, params={"limit": 1000})).json()
    assert (len(whole["data"]), whole["has_more"]) == (1000, True)
    assert fake.registry.num_calls - before == 5
    rest = (await http.get(LORAS, params={"limit": 1000, "after": whole["last_id"]})).json()
    assert (len(rest["data"]), rest["has_more"]) == (503, False)


async def test_the_registry_asks_for_a_key_and_for_the_dispatcher(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    fake.down = True
    for reply in (await http.get(LORAS), await http.delete(f"{LORAS}/pastel")):
        check_error(reply, 503, code="dispatcher_unavailable")
    settings = settings_for(with_keys(config, "right"))
    app = create_app(fake, settings, results=memory_results(), images=sent_images())
    async with http_of(app) as shut:
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/a"), ("DELETE", "/a")):
            check_error(await shut.request(method, LORAS + path), 401, code="invalid_api_key")


# calls


async def test_loras_go_into_the_request_and_come_back(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    reply = await http.post(URL, json={**RED, "n": 2, "loras": TWO})
    assert reply.status_code == 200, reply.text
    said = [{"name": "pastel", "scale": 0.8}, {"name": "outline", "scale": 1.0}]
    assert [one["loras"] for one in reply.json()["data"]] == [said, said]
    for request in fake.offered[0]:
        first, second = request.add_ons.loras
        assert first == LoraUse("pastel", 0.8, "id-pastel")
        assert second == LoraUse("outline", 1.0, "id-outline")
        assert json.loads(request.recipe()["loras"]) == said
    without = (await http.post(URL, json={**RED, "loras": []})).json()
    assert "loras" not in without["data"][0]
    assert "loras" not in fake.offered[1][0].recipe()
    # one question for all of a call, and none without
    assert fake.registry.num_calls == 1


@pytest.mark.parametrize(
    ("loras", "said"),
    [
        ([{"name": "pastell"}], "'pastell', which does not exist. Did you mean 'pastel'?"),
        ([{"name": "inks"}], "made for other, and this image is made by shapes. Set 'model'"),
        ([{"name": "pastel"}, {"name": "pastel"}], "'pastel', twice"),
        ([{"name": "pastel", "scale": 4.1}], "'loras[0].scale' must be at most 4; given 4.1"),
        ([{"name": "pastel", "scale": -5}], "'loras[0].scale' must be at least -4"),
        ([{"name": "pastel"}, {"scale": 1}], "'loras[1].name' is required"),
        ([{"name": ""}], "'loras[0].name' must be a string that is not empty"),
        ([{"name": "pastel", "weight": 1}], "'loras[0].weight' is unknown. Did you mean 'scale'?"),
        ([{"name": "pastel", "scale": "0.8"}], "Write 0.8 without quotes"),
        (["pastel"], "must be a list of"),
        ({"name": "pastel"}, "must be a list"),
        ([{"name": f"l{index}"} for index in range(9)], "at most 8"),
    ],
)
async def test_wrong_loras_are_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, loras: object, said: str
) -> None:
    reply = await http.post(URL, json={**RED, "loras": loras})
    check_error(reply, 400)
    error = reply.json()["error"]
    assert error["param"].partition("[")[0] == "loras"
    assert said in error["message"]
    assert fake.offered == []


async def test_a_scale_is_a_finite_number(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "a", "loras": [{"name": "pastel", "scale": 1e999}]}'
    reply = await http.post(URL, content=body, headers={"content-type": "application/json"})
    check_error(reply, 400, param="loras[0].scale")


async def test_the_codes_tell_the_reasons_apart(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.registry.put(ready_lora("bad", state="failed", reason="is DoRA", is_permanent=True))
    codes = {
        "nothing": "lora_not_found",
        "inks": "lora_of_another_model",
        "bad": "lora_unusable",
    }
    for name, code in codes.items():
        check_error(await http.post(URL, json={**RED, "loras": [{"name": name}]}), 400, code=code)


async def test_edits_and_variations_take_loras_in_forms_and_in_json(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    form = await post_form(http, IMAGE, MASK, loras=TWO)
    body = {**RED, "image": coded(IMAGE), "mask": coded(MASK), "loras": TWO}
    as_json = await http.post(EDITS, json=body)
    vary = await http.post(VARIATIONS, json={"image": coded(IMAGE), "loras": TWO})
    for reply in (form, as_json, vary):
        assert reply.status_code == 200, reply.text
        assert [one["name"] for one in reply.json()["data"][0]["loras"]] == ["pastel", "outline"]
    assert len({offer[0].add_ons for offer in fake.offered}) == 1
    assert all(offer[0].edit is not None for offer in fake.offered)
    fields = [("image", ("upload", IMAGE)), ("prompt", (None, "a"))]
    for part in ("loras[][name]", "loras[0]"):
        reply = await http.post(EDITS, files=[*fields, (part, (None, "pastel"))])
        check_error(reply, 400, param=part)
        assert "'loras' as one text of JSON" in reply.json()["error"]["message"]


async def test_fidelity_was_measured_for_the_base_alone(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    table = StepTable("ddim", 3.0, (FewerSteps(asked=10, balanced=6, fast=3),))
    fake.profiles["shapes"] = replace(shapes_profile(), fewer_steps=table)
    balanced = {**RED, "fidelity": "balanced"}
    assert (await http.post(URL, json=balanced)).status_code == 200
    reply = await http.post(URL, json={**balanced, "loras": TWO})
    check_error(reply, 400, code="fidelity_not_offered", param="fidelity")
    assert "measured without LoRAs" in reply.json()["error"]["message"]


async def test_a_job_is_made_with_its_loras_and_says_so(
    cell_http: httpx.AsyncClient, replica: Replica
) -> None:
    for name in ("pastel", "outline"):
        registered = await cell_http.post(LORAS, json={**PASTEL, "name": name})
        assert registered.status_code == 201
    reply = await cell_http.post("/v1/jobs", json={**RED, "loras": TWO})
    assert reply.status_code == 202, reply.text
    job = reply.json()
    assert job["loras"] == [{"name": "pastel", "scale": 0.8}, {"name": "outline", "scale": 1.0}]
    [lease] = (await replica.poll()).values()
    assert [one.scale for one in lease.request.add_ons.loras] == [0.8, 1.0]
    await replica.finish(lease, b"an image")
    done = await ended(cell_http, job["id"])
    assert (done["state"], done["loras"]) == ("completed", job["loras"])


async def test_a_source_that_is_not_allowed_is_refused(cell_http: httpx.AsyncClient) -> None:
    for source in ("/etc/passwd", "https://host/a.safetensors", "hf:owner/name"):
        reply = await cell_http.post(LORAS, json={**PASTEL, "source": source})
        check_error(reply, 400, code="source_not_allowed", param="source")
        assert "loras.sources" in reply.json()["error"]["message"]
    assert (await cell_http.get(LORAS)).json()["data"] == []


@pytest.fixture
def cell_http(cell: Any, config: ClusterConfig, replica: Replica) -> httpx.AsyncClient:
    """A client of a gateway over the cell with the replica."""
    app = app_of(cell, config, results=cell.results)
    return http_of(app)


def test_the_schema_has_the_bounds(app: FastAPI) -> None:
    document = app.openapi()
    posts = {path: one["post"] for path, one in document["paths"].items() if "post" in one}
    body = posts["/v1/images/generations"]["requestBody"]["content"]["application/json"]["schema"]
    field = next(one for one in body["properties"]["loras"]["anyOf"] if one["type"] == "array")
    assert field["maxItems"] == 8
    assert field["items"]["required"] == ["name"]
    form = posts["/v1/images/edits"]["requestBody"]["content"]["multipart/form-data"]
    assert form["encoding"]["loras"] == {"contentType": "application/json"}
    registration = posts["/v1/loras"]["requestBody"]["content"]["application/json"]["schema"]
    assert registration["required"] == ["name", "base", "source"]
