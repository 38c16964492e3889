"""Calls that bring images: streamed into the input store, bounded, and refused part by part."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import openai
import pytest

from ray_cluster.api.errors import ApiError
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import OPEN_OWNER
from tests.api.checks import check_error, error_of
from tests.api.conftest import Serve, http_of
from tests.api.upload_app import (
    FORM_URL,
    JPEG,
    JSON_URL,
    MAX_BODY_BYTES,
    MAX_INPUT_BYTES,
    MAX_UPLOAD_BYTES,
    PNG,
    WEBP,
    UploadApp,
    ref_of,
)
from tests.jobs.jobs_cell import until

Parts = list[tuple[str, Any]]


@pytest.fixture
def uploads(config: ClusterConfig, tmp_path: Path) -> UploadApp:
    return UploadApp(config, tmp_path)


@pytest.fixture
async def caller(uploads: UploadApp) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(uploads.app) as client:
        yield client


def file(data: bytes = PNG) -> tuple[str, bytes, str]:
    return ("upload", data, "application/octet-stream")


def text(value: str) -> tuple[None, str]:
    return (None, value)


async def refused(caller: httpx.AsyncClient, parts: Parts, param: str | None, **why: Any) -> str:
    reply = await caller.post(FORM_URL, files=parts)
    check_error(reply, why.get("status", 400), code=why.get("code"))
    error = error_of(reply)
    assert error["param"] == param
    return str(error["message"])


# what the official client sends, on a socket


def test_the_official_clients_edits_are_stored(uploads: UploadApp, serve: Serve) -> None:
    client = openai.OpenAI(base_url=f"{serve(uploads.app)}/v1/forms", api_key="any", timeout=60)
    reply: Any = client.images.edit(
        image=[PNG, JPEG, WEBP],
        mask=PNG,
        prompt="ein Käfer",
        n=1,
        extra_body={"loras": json.dumps([{"name": "x", "scale": 0.5}])},
    )
    assert json.loads(reply.texts["loras"]) == [{"name": "x", "scale": 0.5}]
    assert reply.texts == {"prompt": "ein Käfer", "n": "1", "loras": reply.texts["loras"]}
    shas = [ref_of(data).sha256 for data in (PNG, JPEG, WEBP)]
    assert reply.images == {"image": shas, "mask": shas[:1]}
    assert reply.owner == OPEN_OWNER
    for data in (PNG, JPEG, WEBP):
        assert uploads.inputs.get(OPEN_OWNER, ref_of(data)) == data
    # the mask has the bytes of the first image
    assert len(uploads.names) == 3
    one: Any = client.images.edit(image=PNG, prompt="a")
    assert one.images == {"image": shas[:1]}


def test_lists_of_objects_in_a_form_are_refused_by_name(uploads: UploadApp, serve: Serve) -> None:
    client = openai.OpenAI(base_url=f"{serve(uploads.app)}/v1/forms", api_key="any", timeout=60)
    loras = [{"name": "x", "scale": 0.5}, {"name": "y", "scale": 1}]
    with pytest.raises(openai.BadRequestError, match="'loras' as one text of JSON") as caught:
        client.images.edit(image=PNG, prompt="a", extra_body={"loras": loras})
    assert caught.value.param == "loras[][name]"


def test_clients_have_inputs_of_their_own(
    config: ClusterConfig, tmp_path: Path, serve: Serve
) -> None:
    uploads = UploadApp(config, tmp_path, keys=["alice", "bob"])
    url = serve(uploads.app)
    owners = []
    for key in ("alice", "bob"):
        auth = {"Authorization": f"Bearer {key}"}
        mine = PNG + key.encode()
        reply = httpx.post(url + FORM_URL, headers=auth, files=[("image", file(mine))])
        owners.append(reply.json()["owner"])
        as_text = {"image": base64.b64encode(JPEG[:500] + key.encode()).decode()}
        assert httpx.post(url + JSON_URL, headers=auth, json=as_text).json()["owner"] == owners[-1]
    alice, bob = owners
    assert uploads.inputs.get(alice, ref_of(PNG + b"alice")) == PNG + b"alice"
    assert uploads.inputs.get(bob, ref_of(PNG + b"alice")) is None
    assert uploads.inputs.get(OPEN_OWNER, ref_of(PNG + b"alice")) is None
    assert len(uploads.names) == 4
    assert httpx.post(url + FORM_URL, files=[("image", file())]).status_code == 401


def test_a_large_image_is_a_413_that_a_client_reads_and_leaves_nothing(
    uploads: UploadApp, serve: Serve
) -> None:
    url = serve(uploads.app)
    fits, too_large = PNG[:8] + bytes(MAX_INPUT_BYTES - 8), PNG[:8] + bytes(MAX_INPUT_BYTES - 7)
    assert httpx.post(url + FORM_URL, files=[("image", file(fits))]).status_code == 200
    # much comes after what is refused
    reply = httpx.post(url + FORM_URL, files=[("mask", file(too_large)), ("image", file(fits))])
    check_error(reply, 413, code="image_too_large", param="mask")
    assert str(MAX_INPUT_BYTES) in error_of(reply)["message"]
    assert wait_for(lambda: len(uploads.names) == 1)


def test_a_refusal_is_read_though_much_is_still_to_be_sent(
    config: ClusterConfig, tmp_path: Path, serve: Serve
) -> None:
    address = urlparse(serve(UploadApp(config, tmp_path, max_upload_bytes=40 << 20).app))
    # more than sockets buffer
    for data, status in ((PNG + bytes(20 << 20), 413), (b"GIF89a" + bytes(20 << 20), 400)):
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(raw_form(data))
            assert client.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_each_route_has_its_own_bound_on_bodies(uploads: UploadApp, serve: Serve) -> None:
    url = serve(uploads.app)
    images = [("image[]", file(PNG[:8] + bytes([index]) * 90_000)) for index in range(3)]
    assert httpx.post(url + FORM_URL, files=images[:2]).status_code == 200
    reply = httpx.post(url + FORM_URL, files=images)
    check_error(reply, 413, code="body_too_large")
    assert str(MAX_UPLOAD_BYTES) in error_of(reply)["message"]
    body = {"image": base64.b64encode(PNG[:MAX_BODY_BYTES]).decode()}
    reply = httpx.post(url + JSON_URL, json=body)
    check_error(reply, 413, code="body_too_large")
    assert str(MAX_BODY_BYTES) in error_of(reply)["message"]
    reply = httpx.post(f"{url}/v1/images/generations", json={"prompt": "a" * MAX_BODY_BYTES})
    check_error(reply, 413, code="body_too_large")


def test_a_client_that_goes_away_inside_an_image_leaves_nothing(
    uploads: UploadApp, serve: Serve
) -> None:
    address = urlparse(serve(uploads.app))
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(raw_form(PNG)[:-5000])
        time.sleep(0.2)
        assert not [name for name in uploads.names if not name.endswith(".part")]
    assert wait_for(lambda: uploads.names == [])


async def test_a_form_that_is_too_slow_is_a_408(config: ClusterConfig, tmp_path: Path) -> None:
    uploads = UploadApp(config, tmp_path, max_upload_s=0.3)
    request = httpx.Request("POST", f"http://x{FORM_URL}", files=[("image", file())])

    async def dripping() -> AsyncIterator[bytes]:
        for byte in request.read():
            yield bytes([byte])
            await asyncio.sleep(0.01)

    headers = {"content-type": request.headers["content-type"]}
    async with http_of(uploads.app) as caller:
        reply = await caller.post(FORM_URL, content=dripping(), headers=headers)
    check_error(reply, 408, code="body_too_slow")
    assert "limits.max_upload_s" in error_of(reply)["message"]
    await until(lambda: uploads.names == [])


# what is refused, and by which name


async def test_several_images_have_one_spelling(caller: httpx.AsyncClient) -> None:
    for parts in (
        [("image", file()), ("image[]", file(JPEG))],
        [("image[]", file()), ("image", file(JPEG))],
    ):
        message = await refused(caller, parts, parts[1][0], code="duplicate_parameter")
        assert "'image[]'" in message
    for name in ("image", "image[]"):
        four: Parts = [(name, file(PNG + bytes([index]))) for index in range(4)]
        assert "at most 3" in await refused(caller, four, name)
        assert (await caller.post(FORM_URL, files=four[:3])).status_code == 200
    assert "at most 1" in await refused(caller, [("mask[]", file())] * 2, "mask[]")
    assert (await caller.post(FORM_URL, files=[("mask[]", file())])).status_code == 200


@pytest.mark.parametrize(
    ("part", "code", "says"),
    [
        (("image", text("abc")), "invalid_value", "must be a file"),
        (("prompt", file()), "invalid_value", "must be a text"),
        (("image", file(b"")), "invalid_image", "is empty"),
        (("image", file(b"GIF89a" + bytes(99))), "invalid_image", "PNG, JPEG, WebP"),
        (("image", file(PNG[:11])), "invalid_image", "PNG, JPEG, WebP"),
        (("image", file(b"RIFF\0\0\0\0WAVE")), "invalid_image", "PNG, JPEG, WebP"),
        (("prompt", (None, b"\xff\xfe")), "invalid_value", "not UTF-8 at byte 0"),
        (("a[b]", text("c")), "invalid_value", "'a' as one text of JSON"),
    ],
)
async def test_a_wrong_part_is_named(
    caller: httpx.AsyncClient, uploads: UploadApp, part: tuple[str, Any], code: str, says: str
) -> None:
    parts = [("seed", text("5")), part, ("mask", file())]
    assert says in await refused(caller, parts, part[0], code=code)
    await until(lambda: uploads.names == [])


async def test_texts_are_given_once_and_bounded_together(caller: httpx.AsyncClient) -> None:
    twice = [("prompt", text("a")), ("prompt", text("b"))]
    assert "once" in await refused(caller, twice, "prompt", code="duplicate_parameter")
    half = "x" * (MAX_BODY_BYTES // 2)
    fits = [("a", text(half)), ("b", text(half))]
    assert (await caller.post(FORM_URL, files=fits)).json()["texts"] == {"a": half, "b": half}
    many = [*fits, ("c", text("x"))]
    message = await refused(caller, many, "c", status=413, code="body_too_large")
    assert str(MAX_BODY_BYTES) in message


async def test_parts_names_and_headers_are_bounded(caller: httpx.AsyncClient) -> None:
    many: Parts = [(f"p{index}", text("")) for index in range(101)]
    assert (await caller.post(FORM_URL, files=many[:100])).status_code == 200
    assert "100 parts" in await refused(caller, many, None, code="invalid_form")
    assert "name" in await refused(caller, [("n" * 201, text(""))], None, code="invalid_form")
    headers = {f"x-{index}": "y" for index in range(9)}
    parts: Parts = [("mask", file()), ("image", ("f", PNG, "image/png", headers))]
    assert "at part 2" in await refused(caller, parts, None, code="invalid_form")
    parts = [("image", ("f" * 5000, PNG))]
    assert "header size" in await refused(caller, parts, None, code="invalid_form")


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'b' * 71}",
        "multipart/mixed; boundary=b",
        "",
    ],
)
async def test_what_is_no_form_is_a_415(caller: httpx.AsyncClient, content_type: str) -> None:
    reply = await caller.post(FORM_URL, content=b"--b--", headers={"content-type": content_type})
    check_error(reply, 415, code="unsupported_media_type")


HEAD = b'--b\r\nContent-Disposition: form-data; name="image"; filename="f"\r\n'


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"", None, "ends before"),
        (b"no boundary", None, "cannot be read"),
        (HEAD, None, "at part 1: it ends before"),
        (HEAD + b"\r\n" + PNG, "image", "('image'): it ends before"),
        (HEAD + b"\r\n" + PNG + b"\r\n--b", "image", "ends before"),
        (b"--b\r\n\r\nx\r\n--b--", None, "no 'Content-Disposition"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\n\r\n--b--", None, "no 'Content-Disp"),
        (HEAD + HEAD[5:] + b"\r\n\r\n--b--", None, "header 'content-disposition' twice"),
        (HEAD + b"Content-Transfer-Encoding: base64\r\n\r\n\r\n--b--", "image", "as they are"),
    ],
)
async def test_a_damaged_form_is_a_400_and_leaves_nothing(
    caller: httpx.AsyncClient, uploads: UploadApp, body: bytes, param: str | None, says: str
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    reply = await caller.post(FORM_URL, content=body, headers=headers)
    check_error(reply, 400, code="invalid_form")
    assert error_of(reply)["param"] == param
    assert says in error_of(reply)["message"]
    await until(lambda: uploads.names == [])


async def test_a_store_that_fails_is_a_503_with_a_wait(
    caller: httpx.AsyncClient, uploads: UploadApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(uploads.blobs._fs, "open", fail)
    reply = await caller.post(FORM_URL, files=[("image", file())])
    check_error(reply, 503, code="input_store_unavailable")
    assert "no space left" not in reply.text
    reply = await caller.post(JSON_URL, json={"image": base64.b64encode(JPEG).decode()})
    check_error(reply, 503, code="input_store_unavailable")
    with pytest.raises(BlobStoreError, match="no space left"):
        uploads.blobs.writer().write(b"x")


# base64 in JSON


@pytest.mark.parametrize("head", ["", "data:image/png;base64,", "DATA:;charset=x;Base64,"])
async def test_base64_is_stored_as_what_it_says(
    caller: httpx.AsyncClient, uploads: UploadApp, head: str
) -> None:
    body = {"image": head + base64.b64encode(JPEG).decode()}
    reply = await caller.post(JSON_URL, json=body)
    assert reply.json() == {"owner": OPEN_OWNER, "sha256": ref_of(JPEG).sha256}
    assert uploads.inputs.get(OPEN_OWNER, ref_of(JPEG)) == JPEG


CODED = base64.b64encode(JPEG).decode()


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("https://example.org/a.png", "invalid_value", "does not fetch"),
        ("data:image/png," + CODED, "invalid_value", "data:image/png;base64,"),
        ("data:image/png;base64", "invalid_value", "data:image/png;base64,"),
        (CODED[:-1], "invalid_value", "padding is wrong"),
        (CODED[:400] + "=" + CODED[401:], "invalid_value", "padding is wrong"),
        (CODED[:400] + "\0" * 4 + CODED[400:], "invalid_value", "standard alphabet"),
        (CODED.replace("/", "_"), "invalid_value", "standard alphabet"),
        ("ä" * 400, "invalid_value", "base64"),
        ("", "invalid_image", "is empty"),
        (base64.b64encode(b"GIF89a" * 20).decode(), "invalid_image", "PNG, JPEG, WebP"),
    ],
)
async def test_what_is_not_an_image_in_base64_names_its_field(
    caller: httpx.AsyncClient, uploads: UploadApp, given: str, code: str, says: str
) -> None:
    reply = await caller.post(JSON_URL, json={"image": given})
    check_error(reply, 400, code=code, param="image")
    assert says in error_of(reply)["message"]
    await until(lambda: uploads.names == [])


async def test_a_large_image_in_base64_names_its_field(uploads: UploadApp) -> None:
    fits = PNG[:8] + bytes(MAX_INPUT_BYTES - 8)
    ref = await uploads.uploads.store_text("a", base64.b64encode(fits).decode(), "mask")
    assert ref == ref_of(fits)
    with pytest.raises(ApiError) as caught:
        await uploads.uploads.store_text("a", base64.b64encode(fits + b"x").decode(), "mask")
    assert (caught.value.status, caught.value.param) == (413, "mask")


def raw_form(data: bytes) -> bytes:
    """A whole HTTP request with one image."""
    request = httpx.Request("POST", f"http://x{FORM_URL}", files=[("image", file(data))])
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {FORM_URL} HTTP/1.1\r\n{head}\r\n".encode() + request.read()


def wait_for(condition: Any, timeout_s: float = 5.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(condition())
