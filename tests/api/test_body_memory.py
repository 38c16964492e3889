"""What a gateway holds of bodies that arrive: no client keeps others out, by whatever door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.input import bounded_body
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.keys import KeyConfig, Role
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.imaging.edit_images import ImageFacts
from ray_cluster.imaging.processes.fair_queue import QueueFull
from ray_cluster.imaging.processes.image_coder import Source
from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import http_of, shapes_profile
from tests.api.edit_calls import EDITS, IMAGE, JOBS, PROMPT, VARIATIONS, coded
from tests.fakes import FakeDispatcherClient, PlainChecks, memory_results, sent_images, settings_for
from tests.imaging.pictures import file_of
from tests.keys import bearer, with_keys

MIB = 1 << 20
FILES, PREPROCESS, LORAS = "/v1/files", "/v1/preprocess", "/v1/loras"
MAX_BODY_BYTES = 4096
# what cannot be compressed
LARGE = file_of(np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8))
TEXT = {"prompt": "a red circle"}
# doors for bodies without images, with images, and for forms
TEXT_DOORS, IMAGE_DOORS = [URL, JOBS, LORAS], [EDITS, VARIATIONS, JOBS, PREPROCESS]
FORM_DOORS = [EDITS, VARIATIONS, JOBS, PREPROCESS, FILES]


class NoJobs(FakeDispatcherClient):
    """A dispatcher that takes no jobs: that is found when a job's body has been read."""

    async def create_job(self, *_: object, **__: object) -> Any:
        raise DispatcherUnavailable("no jobs")


def is_read(reply: httpx.Response) -> bool:
    """Whether a call's body was read to its end."""
    is_job = str(reply.url).endswith(JOBS)
    return reply.status_code == 200 or (
        is_job and error_of(reply)["code"] == "dispatcher_unavailable"
    )


class Door:
    """A gateway whose bodies may hold 2 MiB with images, and whose clients are slow.

    Args:
        config: of the service; clients are the keys "many", "one" and "two".
    """

    def __init__(self, config: ClusterConfig) -> None:
        limits = {"max_upload_bytes": MIB, "max_input_bytes": MIB, "max_body_bytes": MAX_BODY_BYTES}
        changes = {"limits": config.limits.model_copy(update=limits)}
        roles: list[Role] = ["use", "loras"]
        keys = [KeyConfig.of(name, name, roles) for name in ("many", "one", "two")]
        self.images: SentImages = sent_images()
        self.app: FastAPI = create_app(
            NoJobs(shapes_profile()),
            settings_for(with_keys(config.model_copy(update=changes), *keys)),
            results=memory_results(),
            images=self.images,
        )
        self.http = http_of(self.app)
        self._go_on = asyncio.Event()
        self._held: list[asyncio.Task[httpx.Response]] = []

    async def hold(self, client: str, url: str, num_bytes: int, kind: str = "json") -> None:
        """Begin a call whose body stops after so many bytes; returns when it is refused or held."""
        arrived = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            if kind == "json":
                yield b'{"x": "' + b"a" * (num_bytes - 7)
            else:
                yield b"--b\r\n" + b"a" * num_bytes
            arrived.set()
            await self._go_on.wait()

        types = {"json": "application/json", "form": "multipart/form-data; boundary=b"}
        headers = bearer(client) | {"content-type": types[kind]}
        if num_bytes > MAX_BODY_BYTES:
            # what says nothing of its length is not read on the chance that it has an image
            headers["content-length"] = str(num_bytes + 1)
        call = asyncio.create_task(self.http.post(url, content=slow(), headers=headers))
        self._held.append(call)
        arriving = asyncio.create_task(arrived.wait())
        await asyncio.wait({call, arriving}, return_when=asyncio.FIRST_COMPLETED)
        arriving.cancel()

    @property
    def statuses(self) -> list[int]:
        """Of the calls that have been answered, though their bodies have not ended."""
        return [one.result().status_code for one in self._held if one.done()]

    async def post(self, client: str, url: str, **call: Any) -> httpx.Response:
        return await self.http.post(url, headers=bearer(client), **call)

    async def let_go(self) -> None:
        self._go_on.set()
        await asyncio.gather(*self._held)

    async def leave(self) -> None:
        """All clients go away."""
        for one in self._held:
            one.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)

    @property
    def held(self) -> dict[str, dict[str, int]]:
        """What clients hold of each kind."""
        memory = self.images.memory
        pots = {"texts": memory._texts, "images": memory._images, "forms": memory._forms}
        return {name: dict(pot._held) for name, pot in pots.items() if pot._held}


@pytest.fixture
async def door(config: ClusterConfig) -> AsyncIterator[Door]:
    one = Door(config)
    async with one.http:
        yield one


@pytest.mark.parametrize("url", IMAGE_DOORS)
async def test_slow_bodies_with_images_keep_nobody_out(door: Door, url: str) -> None:
    for _ in range(3):
        await door.hold("many", url, MIB * 2 // 3)
    await door.hold("many", url, MIB // 2)
    # that one was too much
    assert door.statuses == [503]
    for text_url in (URL, JOBS):
        for client in ("one", "many"):
            assert is_read(await door.post(client, text_url, json=TEXT))
    edit = {"prompt": PROMPT, "image": coded(LARGE)}
    assert len(coded(LARGE)) > MIB // 2
    assert (await door.post("one", EDITS, json=edit)).status_code == 200
    check_error(await door.post("many", EDITS, json=edit), 503, code="too_many_uploads")
    await door.let_go()
    assert door.held == {}


async def test_a_client_alone_has_all_and_others_have_their_part(door: Door) -> None:
    for _ in range(2):
        await door.hold("many", EDITS, MIB - 10)
    for client in ("one", "two"):
        await door.hold(client, EDITS, MIB * 2 // 3 - 10)
    assert door.statuses == []
    assert sum(door.held["images"].values()) > 3 * MIB
    await door.hold("two", EDITS, 100_000)
    await door.hold("many", EDITS, 1000)
    assert door.statuses == [503, 503]
    await door.leave()
    assert door.held == {}


@pytest.mark.parametrize("url", TEXT_DOORS)
async def test_many_slow_small_bodies_of_one_client_keep_nobody_out(
    door: Door, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_body, "_TEXT_BYTES", 20 * MAX_BODY_BYTES)
    monkeypatch.setattr(bounded_body, "_TEXTS_AT_ONCE", 1)
    for _ in range(22):
        await door.hold("many", url, 10)
    # each counts as a whole one, whatever has arrived of it
    assert door.statuses == [503] * 2
    for text_url in (URL, JOBS):
        assert is_read(await door.post("one", text_url, json=TEXT))
        refused = await door.post("many", text_url, json=TEXT)
        check_error(refused, 503, code="too_many_uploads")
        assert "86016 bytes, of 81920" in error_of(refused)["message"]
    await door.leave()
    assert door.held == {}
    assert (await door.post("many", URL, json=TEXT)).status_code == 200


@pytest.mark.parametrize("url", FORM_DOORS)
async def test_many_slow_forms_of_one_client_keep_nobody_out(
    door: Door, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_body, "FORMS_AT_ONCE", 4)
    for _ in range(5):
        await door.hold("many", url, 10, "form")
    assert door.statuses == [503]
    for form_url in FORM_DOORS:
        name = "file" if form_url == FILES else "image"
        fields = {FILES: {"purpose": "vision"}, PREPROCESS: {"preprocess": "canny"}}
        data = fields.get(form_url, {} if form_url == VARIATIONS else {"prompt": PROMPT})
        parts = {name: ("a.png", IMAGE)}
        refused = await door.post("many", form_url, files=parts, data=data)
        check_error(refused, 503, code="too_many_uploads")
        assert is_read(await door.post("one", form_url, files=parts, data=data))
    await door.leave()
    assert door.held == {}


async def test_a_small_edit_that_names_a_file_does_not_wait_for_large_ones(door: Door) -> None:
    files = {"file": ("a.png", IMAGE)}
    uploaded = await door.post("many", FILES, files=files, data={"purpose": "vision"})
    for _ in range(2):
        await door.hold("many", EDITS, MIB - 10)
    edit = {"prompt": PROMPT, "image": uploaded.json()["id"]}
    reply = await door.post("many", EDITS, json=edit)
    assert reply.status_code == 200, reply.text
    await door.leave()
    assert door.held == {}


async def test_bodies_that_are_refused_hold_nothing_afterwards(door: Door) -> None:
    for url in {*TEXT_DOORS, *IMAGE_DOORS}:
        for content in (b"{", b"x" * 10_000, b"x" * (MIB + 1)):
            reply = await door.post("one", url, content=content)
            assert reply.status_code in {400, 413, 415}
    for url in FORM_DOORS:
        headers = bearer("one") | {"content-type": "multipart/form-data; boundary=b"}
        reply = await door.http.post(url, content=b"--b\r\n", headers=headers)
        check_error(reply, 400, code="invalid_form")
    assert door.held == {}


async def test_images_that_wait_for_their_check_are_not_in_memory(door: Door) -> None:
    class Noting(PlainChecks):
        def __init__(self) -> None:
            super().__init__()
            self.noted: list[tuple[bool, str]] = []

        def image_facts(
            self, data: Source, param: str, max_pixels: int, client: str
        ) -> Future[ImageFacts]:
            self.noted.append((callable(data), client))
            return super().image_facts(data, param, max_pixels, client)

    checks = door.images._checks = Noting()
    body = {"prompt": PROMPT, "image": coded(IMAGE)}
    for client in ("one", "two"):
        assert (await door.post(client, EDITS, json=body)).status_code == 200
    assert checks.noted == [(True, "one"), (True, "two")]


async def test_too_many_images_that_wait_are_refused_with_a_wait(door: Door) -> None:
    class Full(PlainChecks):
        def image_facts(self, *_: object) -> Future[ImageFacts]:
            raise QueueFull("full")

    door.images._checks = Full()
    reply = await door.post("one", EDITS, json={"prompt": PROMPT, "image": coded(IMAGE)})
    check_error(reply, 503, code="too_many_checks")
    assert reply.headers["x-should-retry"] == "true"
