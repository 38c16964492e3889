"""Which key may call what: every route of the application, by every kind of key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import Route

from ray_cluster.api.app import create_app
from ray_cluster.api.routes.table import _add
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.keys import RESERVED_CLIENTS, ROLES, KeyConfig, Role
from ray_cluster.config.settings import settings_of
from ray_cluster.protocol.settings import gateway_settings
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import OPEN_OWNER
from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import app_of, shapes_config
from tests.api.edit_calls import IMAGE, coded, parts, post_form, post_json
from tests.fakes import FakeDispatcherClient, memory_results, sent_images, settings_for
from tests.jobs.jobs_cell import JobsCell, Replica
from tests.keys import bearer, with_keys

USE, LORAS, OPERATE = {"use"}, {"loras"}, {"operate"}
PUBLIC: set[str] = set()
# the roles of which a key needs one, by route; HEAD is as GET
CALLS = {
    "GET /healthz": PUBLIC,
    "GET /readyz": PUBLIC,
    "GET /metrics": PUBLIC,
    "GET /": PUBLIC,
    "GET /page/{name:path}": PUBLIC,
    "GET /docs": PUBLIC,
    "GET /docs/oauth2-redirect": PUBLIC,
    "GET /openapi.json": PUBLIC,
    "GET /v1/files/{file_id}": PUBLIC,
    "POST /v1/images/generations": USE,
    "POST /v1/images/edits": USE,
    "POST /v1/images/variations": USE,
    "POST /v1/images/estimate": USE,
    "GET /v1/models": USE,
    "GET /v1/models/{model:path}": USE,
    "POST /v1/loras": LORAS,
    "GET /v1/loras": USE | LORAS,
    "GET /v1/loras/{name}": USE | LORAS,
    "DELETE /v1/loras/{name}": LORAS,
    "GET /v1/controlnets": USE,
    "POST /v1/preprocess": USE,
    "POST /v1/files": USE,
    "GET /v1/files/file-{digest}": USE,
    "POST /v1/jobs": USE,
    "GET /v1/jobs": USE,
    "GET /v1/jobs/{job_id}": USE,
    "DELETE /v1/jobs/{job_id}": USE,
    "GET /v1/jobs/{job_id}/events": USE,
    "GET /v1/cell/events": OPERATE,
    "GET /v1/plan": USE | OPERATE,
    "POST /v1/plan/pause": OPERATE,
    "POST /v1/plan/resume": OPERATE,
}
KEYS: dict[str, tuple[Role, ...]] = {
    "plain": ("use",),
    **{f"only-{role}": (role,) for role in ROLES},
    "all": ROLES,
}
RED = {"prompt": "a red circle"}


@pytest.fixture
def config() -> ClusterConfig:
    found = shapes_config()
    # every route is called, and streams have to end
    limits = found.limits.model_copy(update={"max_stream_s": 0.01})
    return found.model_copy(update={"limits": limits})


def keyed(config: ClusterConfig) -> ClusterConfig:
    named = (KeyConfig.of(key, key, roles) for key, roles in KEYS.items() if key != "plain")
    return with_keys(config, "plain", *named)


@asynccontextmanager
async def calling(app: FastAPI, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {} if key is None else bearer(key)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=headers
    ) as http:
        yield http


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path that is answered, also what the document leaves out."""
    for one in app.routes:
        # a router that was included is one route
        inner = getattr(one, "original_router", None)
        for route in [one] if inner is None else inner.routes:
            assert isinstance(route, Route), "say of another kind of route who may call it"
            yield from ((method, route.path) for method in route.methods or ())


async def test_every_route_is_called_by_those_whose_key_has_a_role_for_it(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    app = app_of(fake, keyed(config))
    routes = set(routes_of(app))
    as_read = {(method.replace("HEAD", "GET"), path) for method, path in routes}
    assert {" ".join(one) for one in as_read} == CALLS.keys(), "say here who may call a new route"
    for key in (None, "wrong", *KEYS):
        async with calling(app, key) as http:
            for method, path in sorted(routes):
                needed = CALLS[f"{method.replace('HEAD', 'GET')} {path}"]
                reply = await http.request(method, re.sub(r"\{.*?\}", "x", path))
                if not needed or needed & set(KEYS.get(key or "", ())):
                    assert reply.status_code not in {401, 403, 500}, (key, method, path)
                elif method == "HEAD":
                    assert reply.status_code == (403 if key in KEYS else 401), (key, path)
                elif key in KEYS:
                    check_error(reply, 403, code="role_missing")
                    assert error_of(reply)["param"] is None
                else:
                    check_error(reply, 401, code="invalid_api_key")


async def test_on_an_open_service_everybody_has_all_roles(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    app = app_of(fake, config)
    async with calling(app) as http:
        for method, path in sorted(routes_of(app)):
            reply = await http.request(method, re.sub(r"\{.*?\}", "x", path))
            assert reply.status_code not in {401, 403, 500}, (method, path)
        assert (await http.post(URL, json={**RED, "priority": 100})).status_code == 200


def test_a_route_without_a_role_cannot_be_made() -> None:
    async def endpoint() -> None:
        """Do nothing."""

    guarded = APIRouter(prefix="/v1", dependencies=[Depends(endpoint)])
    with pytest.raises(ValueError, match="POST /new: name a role"):
        _add(guarded, "POST /new", endpoint, "New", ())
    with pytest.raises(ValueError, match="GET /new: name a role"):
        _add(APIRouter(), "GET /new", endpoint, "New", ("use",))


async def test_who_lacks_a_role_is_told_which(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    app = app_of(fake, keyed(config))
    async with calling(app, "plain") as http:
        error = error_of(await http.post("/v1/plan/pause"))
        assert error["message"].startswith(
            "This call needs an API key with the role 'operate', and yours has 'use'."
        )
    async with calling(app, "only-operate") as http:
        message = error_of(await http.get("/v1/loras"))["message"]
        assert "role 'use' or 'loras', and yours has 'operate'" in message
        description = (await http.get("/openapi.json")).json()
    for path, calls in description["paths"].items():
        for method, call in calls.items():
            is_guarded = bool(CALLS.get(f"{method.upper()} {path}", USE))
            assert ("403" in call["responses"]) is is_guarded, (method, path)


# every way to send a call for images, with a priority
SENT: dict[str, Callable[[httpx.AsyncClient, int], Awaitable[httpx.Response]]] = {
    "images": lambda http, number: http.post(URL, json={**RED, "priority": number}),
    "stream": lambda http, number: http.post(URL, json={**RED, "priority": number, "stream": True}),
    "edit in a form": lambda http, number: post_form(http, priority=number),
    "edit in JSON": lambda http, number: post_json(http, priority=number),
    "variation": lambda http, number: http.post(
        "/v1/images/variations", files=parts({"image": IMAGE}, {"priority": number})
    ),
    "job": lambda http, number: http.post("/v1/jobs", json={**RED, "priority": number}),
    "job of an edit": lambda http, number: http.post(
        "/v1/jobs", json={**RED, "image": coded(IMAGE), "priority": number}
    ),
    "job in a form": lambda http, number: http.post(
        "/v1/jobs", files=parts({"image": IMAGE}, {**RED, "priority": number})
    ),
}


@pytest.mark.parametrize("way", SENT)
async def test_only_operators_go_before_others(
    fake: FakeDispatcherClient, config: ClusterConfig, way: str
) -> None:
    limits = config.limits.model_copy(update={"max_body_bytes": 1 << 20})
    app = app_of(fake, keyed(config.model_copy(update={"limits": limits})))
    async with calling(app, "plain") as http:
        for priority in (1, 100):
            reply = await SENT[way](http, priority)
            check_error(reply, 403, code="role_missing", param="priority")
            assert f"'priority' to 0 or less: {priority} needs" in error_of(reply)["message"]
        assert not fake.offered
        for priority in (0, -100):
            # the fake has no jobs
            assert (await SENT[way](http, priority)).status_code in {200, 500}
    async with calling(app, "all") as http:
        assert (await SENT[way](http, 7)).status_code in {200, 500}


async def test_a_role_that_is_taken_away_is_gone_at_the_next_call(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    settings = settings_for(with_keys(config, KeyConfig.of("ci", "k", ROLES)))
    app = create_app(fake, settings, results=memory_results(), images=sent_images())
    async with calling(app, "k") as http:
        check_error(await http.post("/v1/plan/pause"), 404, code="no_controller")
        settings.put(
            gateway_settings(settings_of(with_keys(config, KeyConfig.of("ci", "k", ["use"]))))
        )
        check_error(await http.post("/v1/plan/pause"), 403, code="role_missing")
        settings.put(
            gateway_settings(settings_of(with_keys(config, KeyConfig.of("ci", "other", ROLES))))
        )
        check_error(await http.post("/v1/plan/pause"), 401, code="invalid_api_key")


async def test_a_client_keeps_its_jobs_when_its_key_is_replaced(
    cell: JobsCell, replica: Replica, config: ClusterConfig
) -> None:
    old, new = KeyConfig.of("shop.eu", "old", ["use"]), KeyConfig.of("shop.eu", "new", ["use"])
    settings = settings_for(with_keys(config, old, new, "other"))
    app = create_app(cell, settings, results=cell.results, images=sent_images())
    named: dict[str, Any] = {"json": RED, "headers": {"Idempotency-Key": "order-17"}}
    async with calling(app, "old") as http:
        job = (await http.post("/v1/jobs", **named)).json()
    kept = cell.store.get(job["id"])
    assert kept is not None
    assert kept.client == "shop.eu"
    settings.put(gateway_settings(settings_of(with_keys(config, new, "other"))))
    async with calling(app, "new") as http:
        assert (await http.get(f"/v1/jobs/{job['id']}")).json()["id"] == job["id"]
        again = await http.post("/v1/jobs", **named)
        assert (again.status_code, again.json()["id"]) == (200, job["id"])
    async with calling(app, "old") as http:
        check_error(await http.get(f"/v1/jobs/{job['id']}"), 401)
    async with calling(app, "other") as http:
        check_error(await http.get(f"/v1/jobs/{job['id']}"), 404, code="job_not_found")


async def test_clients_with_like_names_have_files_of_their_own(
    fake: FakeDispatcherClient, config: ClusterConfig, tmp_path: Path
) -> None:
    """Names have a letter that owners in the store have not."""
    names = ["a.b", "adb", "a-b", "a_b", "a" * 63, "0"]
    settings = settings_for(with_keys(config, *(KeyConfig.of(one, one, ["use"]) for one in names)))
    images, store = sent_images(str(tmp_path)), BlobStore(str(tmp_path))
    app = create_app(fake, settings, results=memory_results(), images=images)
    for number, name in enumerate(names, start=1):
        async with calling(app, name) as http:
            reply = await http.post(
                "/v1/files", files=parts({"file": IMAGE}, {"purpose": "vision"})
            )
            assert reply.is_success, reply.text
            assert sum(1 for _ in store.entries()) == number


def test_no_client_is_called_as_all_callers_without_a_key() -> None:
    assert OPEN_OWNER in RESERVED_CLIENTS
