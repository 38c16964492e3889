"""Uploaded files: kept under an id for a while, for their client alone, and used by later calls."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.output.resource_schemas import FileResponse
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from ray_cluster.storage.inputs import InputStore
from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import Serve, http_of
from tests.api.controlnet_calls import (
    RED,
    SKETCH,
    controls_config,
    controls_fake,
    controls_http,
    entry,
)
from tests.api.edit_calls import EDITS, IMAGE, MASK, coded, picture, ref_of
from tests.fakes import FakeClock, FakeDispatcherClient, PlainChecks, memory_results, settings_for
from tests.keys import with_keys

FILES = "/v1/files"
VISION = {"purpose": (None, "vision")}
GRACE_S = 3600.0


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return controls_fake()


@pytest.fixture
async def http(fake: FakeDispatcherClient, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with controls_http(fake, str(tmp_path)) as client:
        yield client


async def uploaded(http: httpx.AsyncClient, data: bytes = SKETCH) -> str:
    reply = await http.post(FILES, files={"file": ("sketch.png", data), **VISION})
    assert reply.status_code == 200, reply.text
    file_id = reply.json()["id"]
    assert isinstance(file_id, str)
    return file_id


def id_of(data: bytes) -> str:
    return f"file-{hashlib.sha256(data).hexdigest()}-{len(data)}"


async def test_a_file_is_kept_and_described(http: httpx.AsyncClient) -> None:
    reply = await http.post(FILES, files={"file": ("sketch.png", SKETCH), **VISION})
    card = reply.json()
    FileResponse.model_validate(card, strict=True, extra="forbid")
    assert (card["id"], card["bytes"], card["object"]) == (id_of(SKETCH), len(SKETCH), "file")
    assert card["expires_at"] == card["created_at"] + GRACE_S
    shown = await http.get(f"{FILES}/{card['id']}")
    assert shown.status_code == 200
    assert shown.json().keys() == card.keys()
    assert shown.json()["filename"] == card["filename"]
    assert (await http.head(f"{FILES}/{card['id']}")).status_code == 200


async def test_a_file_stands_for_an_image_wherever_calls_take_one(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    sketch, image, mask = [await uploaded(http, data) for data in (SKETCH, IMAGE, MASK)]
    for text in (sketch, {"file_id": sketch}):
        chosen = [{"name": "edges", "image": text}]
        reply = await http.post(URL, json={**RED, "controlnets": chosen})
        assert reply.status_code == 200, reply.text
        [use] = fake.offered[-1][0].add_ons.controls
        assert use.sent_sha256 == ref_of(SKETCH).sha256
    bodies = (
        {"image": image, "mask": mask},
        {"images": [{"file_id": image}], "mask": {"file_id": mask}},
        {"image": {"file_id": image}, "mask": coded(MASK)},
    )
    for body in bodies:
        reply = await http.post(EDITS, json={**RED, **body})
        assert reply.status_code == 200, reply.text
        edit = fake.offered[-1][0].edit
        assert edit is not None
        assert (edit.image, edit.mask) == (ref_of(IMAGE), ref_of(MASK))


@pytest.mark.parametrize(
    "file_id",
    [
        "file-",
        "file-1",
        f"file-{'0' * 64}-5",
        # its size is another
        f"file-{hashlib.sha256(SKETCH).hexdigest()}-{len(SKETCH) + 1}",
        f"{id_of(SKETCH)}x",
        id_of(SKETCH).upper().replace("FILE", "file"),
    ],
)
async def test_what_was_not_uploaded_is_not_found(http: httpx.AsyncClient, file_id: str) -> None:
    await uploaded(http)
    reply = await http.get(f"{FILES}/{file_id}")
    check_error(reply, 404, code="file_not_found")
    for path, body, param in (
        (EDITS, {"image": file_id}, "image"),
        (EDITS, {"images": [{"file_id": file_id}]}, "images"),
        (URL, {"controlnets": [{"name": "edges", "image": file_id}]}, "controlnets[0].image"),
    ):
        reply = await http.post(path, json={**RED, **body})
        check_error(reply, 400, code="file_not_found", param=param)


@pytest.mark.parametrize(
    ("sent", "param", "said"),
    [
        ({"file": ("a.png", SKETCH)}, "purpose", "send 'vision'"),
        ({"file": ("a.png", SKETCH), "purpose": (None, "batch")}, "purpose", "'vision'"),
        (VISION, "file", "is required"),
        ({"file": (None, "text"), **VISION}, "file", "must be a file"),
        ({"file": ("a.txt", b"some longer text"), **VISION}, "file", "PNG, JPEG, WebP"),
        ({"file": ("a.png", SKETCH[:-40]), **VISION}, "file", "cannot be decoded"),
        ({"file": ("a.png", picture(128, 128)), **VISION}, "file", "16384 pixels"),
        ({"file": ("a.png", SKETCH), "x": (None, "1"), **VISION}, "x", "unknown"),
        ({"file": ("a.png", SKETCH), "x": ("b.png", SKETCH), **VISION}, "x", "must be a text"),
        (
            {"file": ("a.png", SKETCH), "expires_after": (None, "9"), **VISION},
            "expires_after",
            "inputs_grace_s",
        ),
    ],
)
async def test_what_is_no_image_is_refused_by_its_part(
    fake: FakeDispatcherClient,
    tmp_path: Path,
    sent: dict[str, tuple[str | None, bytes | str]],
    param: str,
    said: str,
) -> None:
    async with controls_http(fake, str(tmp_path), max_input_pixels=16_000) as http:
        reply = await http.post(FILES, files=sent)
        check_error(reply, 400, param=param)
        assert said in error_of(reply)["message"]
        reply = await http.post(FILES, json={"purpose": "vision"})
        check_error(reply, 415, code="unsupported_media_type")


# clients, time, failures


@asynccontextmanager
async def gateway(
    inputs: InputStore, fake: FakeDispatcherClient, clock: FakeClock, *keys: str
) -> AsyncIterator[FastAPI]:
    yield create_app(
        fake,
        settings_for(with_keys(controls_config(), *keys)),
        clock=clock,
        results=memory_results(),
        images=SentImages(inputs, PlainChecks()),
    )


async def test_a_file_is_its_clients_alone_and_a_result_needs_no_key(
    fake: FakeDispatcherClient, tmp_path: Path
) -> None:
    inputs = InputStore.open(str(tmp_path), grace_s=GRACE_S)
    async with gateway(inputs, fake, FakeClock(), "alice", "bob") as app:
        transport = httpx.ASGITransport(app)
        clients = [
            httpx.AsyncClient(
                transport=transport,
                base_url="http://gateway",
                headers={"Authorization": f"Bearer {key}"},
            )
            for key in ("alice", "bob")
        ]
        alice, bob = clients
        file_id = await uploaded(alice)
        assert (await alice.get(f"{FILES}/{file_id}")).status_code == 200
        check_error(await bob.get(f"{FILES}/{file_id}"), 404, code="file_not_found")
        body = {**RED, "controlnets": [{"name": "edges", "image": file_id}]}
        check_error(await bob.post(URL, json=body), 400, code="file_not_found")
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as nobody:
            for reply in (
                await nobody.get(f"{FILES}/{file_id}"),
                await nobody.post(FILES, files={"file": ("a.png", SKETCH), **VISION}),
            ):
                check_error(reply, 401, code="invalid_api_key")
            # the image of a reply is found without one
            reply = await nobody.get(f"{FILES}/img-{'0' * 32}.png")
            check_error(reply, 404, code="file_not_found")


async def test_a_call_that_names_a_file_starts_its_time_anew(
    fake: FakeDispatcherClient, tmp_path: Path
) -> None:
    clock = FakeClock(100 * GRACE_S)
    inputs = InputStore(BlobStore(str(tmp_path)), grace_s=GRACE_S, wall_clock=clock)
    async with gateway(inputs, fake, clock) as app, http_of(app) as http:
        used, idle = await uploaded(http), await uploaded(http, picture(32, 32))
        clock.advance(1.5 * GRACE_S)
        body = {**RED, "controlnets": [{"name": "edges", "image": used}]}
        assert (await http.post(URL, json=body)).status_code == 200
        clock.advance(0.6 * GRACE_S)
        # of two periods ago; what files were written at is the disk's, not this clock's
        inputs.sweep(sent_before_s=1e12, keep=())
        assert (await http.get(f"{FILES}/{used}")).status_code == 200
        check_error(await http.get(f"{FILES}/{idle}"), 404)


async def test_a_store_that_fails_is_503(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = await uploaded(http)

    def fail(*_: object) -> None:
        raise BlobStoreError("the disk is full")

    for name in ("find", "get", "writer"):
        monkeypatch.setattr(BlobStore, name, fail)
    for reply in (
        await http.get(f"{FILES}/{file_id}"),
        await http.post(FILES, files={"file": ("a.png", SKETCH), **VISION}),
        await http.post(URL, json={**RED, "controlnets": [{"name": "edges", "image": file_id}]}),
        await http.post(URL, json={**RED, "controlnets": [entry()]}),
    ):
        check_error(reply, 503, code="input_store_unavailable")


def test_the_official_client_uploads_and_uses_a_file(
    fake: FakeDispatcherClient, tmp_path: Path, serve: Serve
) -> None:
    path = tmp_path / "sketch.png"
    path.write_bytes(SKETCH)
    inputs = InputStore.open(str(tmp_path / "inputs"), grace_s=GRACE_S)
    app = create_app(
        fake,
        settings_for(controls_config()),
        results=memory_results(),
        images=SentImages(inputs, PlainChecks()),
    )
    client = openai.OpenAI(base_url=f"{serve(app)}/v1", api_key="any", timeout=60, max_retries=0)
    with path.open("rb") as stream:
        file = client.files.create(file=stream, purpose="vision")
    assert (file.id, file.bytes, file.purpose) == (id_of(SKETCH), len(SKETCH), "vision")
    assert client.files.retrieve(file.id).created_at >= file.created_at - 1
    chosen = [{"name": "edges", "image": file.id, "preprocess": "canny", "scale": 0.7}]
    reply = client.images.generate(prompt="a red circle", extra_body={"controlnets": chosen})
    assert reply.data
    assert reply.data[0].model_extra is not None
    said = reply.data[0].model_extra["controlnets"]
    assert said == [
        {"name": "edges", "scale": 0.7, "start": 0.0, "end": 1.0, "preprocess": "canny"}
    ]
    [event] = client.images.generate(prompt="a", stream=True, extra_body={"controlnets": chosen})
    assert event.model_extra is not None
    assert event.model_extra["controlnets"] == said
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-1")
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        client.images.generate(prompt="a", extra_body={"controlnets": [{**chosen[0], "name": "x"}]})
