"""Bodies of edits: how large and how slow they may be, and where their images are stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from ray_cluster.storage.inputs import InputStore
from tests.api.checks import check_error, error_of
from tests.api.conftest import app_of, shapes_profile
from tests.api.edit_calls import (
    EDITS,
    IMAGE,
    JOBS,
    MASK,
    PROMPT,
    VARIATIONS,
    coded,
    parts,
    post_form,
    post_json,
    ref_of,
)
from tests.fakes import FakeDispatcherClient, PlainChecks, memory_results, sent_images, settings_for
from tests.imaging.pictures import file_of
from tests.keys import with_keys

JSON = {"content-type": "application/json"}
# what cannot be compressed
LARGE = file_of(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))


def client_of(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


def app_with(fake: FakeDispatcherClient, config: ClusterConfig, **limits: Any) -> FastAPI:
    changes = {"limits": config.limits.model_copy(update=limits)}
    return app_of(fake, config.model_copy(update=changes))


@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
async def test_an_image_beyond_its_bound_is_a_413(
    fake: FakeDispatcherClient, config: ClusterConfig, url: str
) -> None:
    async with client_of(app_with(fake, config, max_input_bytes=len(LARGE) - 1)) as http:
        for reply in (
            await http.post(url, files=parts({"image": LARGE}, {"prompt": PROMPT})),
            await http.post(url, json={"prompt": PROMPT, "image": coded(LARGE)}),
        ):
            check_error(reply, 413, code="image_too_large", param="image")
            assert str(len(LARGE) - 1) in error_of(reply)["message"]
    assert fake.offered == []


@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
async def test_a_body_beyond_its_bound_is_a_413(
    fake: FakeDispatcherClient, config: ClusterConfig, url: str
) -> None:
    most = {"max_input_bytes": len(LARGE), "max_upload_bytes": len(LARGE)}
    async with client_of(app_with(fake, config, **most)) as http:
        for reply in (
            await http.post(url, files=parts({"image": LARGE}, {"prompt": PROMPT})),
            await http.post(url, json={"prompt": PROMPT, "image": coded(LARGE)}),
        ):
            check_error(reply, 413, code="body_too_large")
            assert str(len(LARGE)) in error_of(reply)["message"]
    assert fake.offered == []


async def test_a_job_that_does_not_say_how_large_it_is_may_be_as_large_as_one_from_text(
    http: httpx.AsyncClient, config: ClusterConfig
) -> None:
    body = json.dumps({"prompt": PROMPT, "image": coded(LARGE)}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        yield body

    reply = await http.post(JOBS, content=chunks(), headers=JSON)
    check_error(reply, 413, code="body_too_large")
    assert f"{config.limits.max_body_bytes} bytes" in error_of(reply)["message"]
    # it is known to be an edit
    assert (await http.post(EDITS, content=chunks(), headers=JSON)).status_code == 200


@pytest.mark.parametrize("url", [EDITS, JOBS])
async def test_a_body_of_very_many_values_is_not_parsed(http: httpx.AsyncClient, url: str) -> None:
    content = b'{"prompt": "a", "image": [' + b"[]," * 200_000 + b"[]]}"
    reply = await http.post(url, content=content, headers=JSON)
    check_error(reply, 400, code="invalid_json")
    assert "more than 100000 values" in error_of(reply)["message"]


async def test_a_prompt_of_commas_is_read(fake: FakeDispatcherClient, config: Any) -> None:
    limits = {"max_prompt_chars": 60_000, "max_body_bytes": 1 << 20}
    async with client_of(app_with(fake, config, **limits)) as http:
        assert (await post_json(http, prompt="a," * 30_000)).status_code == 200


@pytest.mark.parametrize("begins", [b'{"image": "', b"--b\r\n"], ids=["JSON", "a form"])
async def test_a_body_that_never_ends_is_a_408(
    fake: FakeDispatcherClient, config: ClusterConfig, begins: bytes
) -> None:
    async def unending() -> AsyncIterator[bytes]:
        yield begins
        await asyncio.Event().wait()

    kind = "application/json" if begins[0] == ord("{") else "multipart/form-data; boundary=b"
    async with client_of(app_with(fake, config, max_upload_s=0.2)) as http:
        reply = await http.post(EDITS, content=unending(), headers={"content-type": kind})
    check_error(reply, 408, code="body_too_slow")
    assert "limits.max_upload_s" in error_of(reply)["message"]


async def test_clients_have_images_of_their_own(
    fake: FakeDispatcherClient, config: ClusterConfig, tmp_path: Path
) -> None:
    inputs = InputStore(BlobStore(str(tmp_path)), grace_s=3600.0, wall_clock=time.time)
    app = create_app(
        fake,
        settings_for(with_keys(config, "alice", "bob")),
        results=memory_results(),
        images=SentImages(inputs, PlainChecks()),
    )
    for key, post in (("alice", post_form), ("bob", post_json)):
        async with client_of(app, Authorization=f"Bearer {key}") as http:
            reply = await post(http, IMAGE, MASK if key == "alice" else None)
            assert reply.status_code == 200, reply.text
    [alice], [bob] = fake.offered
    assert alice.owner != bob.owner
    assert "alice" not in alice.owner
    assert inputs.get(alice.owner, ref_of(IMAGE)) == inputs.get(bob.owner, ref_of(IMAGE)) == IMAGE
    assert inputs.get(alice.owner, ref_of(MASK)) == MASK
    assert inputs.get(bob.owner, ref_of(MASK)) is None
    async with client_of(app) as http:
        check_error(await post_form(http), 401)


@pytest.mark.parametrize("broken", ["put", "get"])
@pytest.mark.parametrize("post", [post_form, post_json])
async def test_a_store_that_fails_is_a_503_with_a_wait(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch, post: Any, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlobStoreError("no space left")

    fake = FakeDispatcherClient(shapes_profile())
    inputs = InputStore.open("memory://failing", grace_s=3600.0)
    images = SentImages(inputs, PlainChecks())
    app = app_of(fake, config, images=images)
    monkeypatch.setattr(inputs, broken, fail)
    async with client_of(app) as http:
        reply = await post(http, IMAGE, MASK)
    check_error(reply, 503, code="input_store_unavailable")
    assert "no space left" not in reply.text
    assert fake.offered == []


@pytest.mark.parametrize("url", [EDITS, JOBS])
async def test_what_bodies_hold_together_is_bounded(
    fake: FakeDispatcherClient, config: ClusterConfig, url: str
) -> None:
    content = json.dumps({"prompt": PROMPT, "image": coded(LARGE)}).encode()
    most = len(content)
    app = app_with(fake, config, max_upload_bytes=most, max_input_bytes=most)
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield content[:-1]
        await go_on.wait()
        yield content[-1:]

    async with client_of(app) as http:
        first, second = (
            asyncio.create_task(http.post(EDITS, content=slow(), headers=JSON)) for _ in range(2)
        )
        await asyncio.sleep(0.1)
        check_error(
            await http.post(url, content=content, headers=JSON), 503, code="too_many_uploads"
        )
        # files of a form are not held
        assert (await post_form(http)).status_code == 200
        go_on.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        again = await http.post(EDITS, content=content, headers=JSON)
        assert again.status_code == 200, again.text


async def test_a_large_body_is_read_in_a_thread(http: httpx.AsyncClient) -> None:
    large = file_of(np.random.default_rng(0).integers(0, 256, (640, 640, 3), np.uint8))
    assert len(coded(large)) > 1 << 20
    assert (await post_json(http, large)).status_code == 200
    content = b'{"prompt": "' + b"x" * (1 << 20)
    check_error(await http.post(EDITS, content=content, headers=JSON), 400, code="invalid_json")


async def test_what_checks_images_may_fail_in_any_way(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    class Failing(PlainChecks):
        def image_facts(self, *_: Any) -> Any:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    images = sent_images()
    images._checks = Failing()
    app = app_of(fake, config, images=images)
    async with client_of(app) as http:
        check_error(await post_form(http), 503, code="checks_unavailable")
