"""Bodies as browsers, shells and other languages' clients send them."""

from __future__ import annotations

import base64

import httpx
import pytest

from ray_cluster.api.input import form_reader
from tests.api.checks import check_error, error_of
from tests.api.edit_calls import EDITS, IMAGE, MASK, PROMPT, coded, ref_of
from tests.fakes import FakeDispatcherClient

FORM = {"Content-Type": "multipart/form-data; boundary=b"}


def part(head: str, data: bytes, *more: str) -> bytes:
    lines = [f"--b\r\nContent-Disposition: form-data; {head}", *more, "", ""]
    return "\r\n".join(lines).encode() + data + b"\r\n"


async def send(http: httpx.AsyncClient, *parts: bytes) -> httpx.Response:
    body = b"".join((part('name="prompt"', PROMPT.encode()), *parts, b"--b--\r\n"))
    return await http.post(EDITS, content=body, headers=FORM)


def plain(data: bytes = IMAGE) -> bytes:
    return part('name="image"; filename="a.png"', data)


@pytest.mark.parametrize(
    "head",
    [
        "name=\"image\"; filename*=utf-8''my%20photo.png",
        "filename*=UTF-8'de'K%C3%A4fer.png; name=image",
        "name=\"image\"; FileName* = utf-8''a.png",
        'name="image"; filename*0="my pho"; filename*1="to.png"',
        "name=\"image\"; filename*0*=utf-8''my; filename*1*=%20photo.png",
        'name="image"; filename=""',
    ],
)
async def test_a_file_is_one_however_its_name_is_written(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, head: str
) -> None:
    assert (await send(http, part(head, IMAGE))).status_code == 200
    assert fake.offered[-1][0].edit.image == ref_of(IMAGE)  # type: ignore[union-attr]


async def test_a_file_without_a_name_is_one_by_its_type(http: httpx.AsyncClient) -> None:
    for kind in ("image/png", "application/octet-stream"):
        given = part('name="image"', IMAGE, f"Content-Type: {kind}")
        assert (await send(http, given)).status_code == 200
    # a name that only mentions it is no file's
    reply = await send(http, part('name="image"; x="; filename*=a"', IMAGE))
    check_error(reply, 400, param="image")
    assert "must be a file" in error_of(reply)["message"]


async def test_what_a_form_leaves_empty_is_absent(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    names = ("size", "model", "n", "seed", "quality", "strength", "loras", "user", "style", "x")
    empty = [part(f'name="{name}"', b"") for name in names]
    unchosen = "Content-Type: application/octet-stream"
    files = [part(f'name="{name}"; filename=""', b"", unchosen) for name in ("mask", "map")]
    reply = await send(http, *empty, plain(), *files, part('name="mask"', b""))
    assert reply.status_code == 200, reply.text
    [request] = fake.offered[-1]
    assert request.edit is not None
    assert request.edit.mask is None


@pytest.mark.parametrize("head", ['name="image"', 'name="image"; filename=""'])
async def test_an_image_that_is_left_empty_is_missing(http: httpx.AsyncClient, head: str) -> None:
    reply = await send(http, part(head, b""), part('name="mask"; filename="m.png"', MASK))
    check_error(reply, 400, param="image")
    # a file that was chosen, and has nothing in it, is another matter
    reply = await send(http, plain(b""))
    check_error(reply, 400, code="invalid_image", param="image")
    assert "is empty" in error_of(reply)["message"]


@pytest.mark.parametrize(
    "text",
    [
        coded(IMAGE) + "\n",
        base64.encodebytes(IMAGE).decode(),
        "\r\n".join(coded(IMAGE)[at : at + 64] for at in range(0, len(coded(IMAGE)), 64)),
        f" data:image/png;base64,\n{base64.encodebytes(IMAGE).decode()}",
    ],
)
async def test_base64_may_have_line_breaks(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, text: str
) -> None:
    reply = await http.post(EDITS, json={"prompt": PROMPT, "image": text})
    assert reply.status_code == 200, reply.text
    assert fake.offered[-1][0].edit.image == ref_of(IMAGE)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "is HEIC, which the service reads if pillow-heif is"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "is a film"),
        (b"GIF89a" + bytes(20), "is a GIF"),
        (b"%PDF-1.7" + bytes(20), "is a PDF"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"what is this?", "begins with b'what is this"),
    ],
)
async def test_files_of_other_kinds_are_named(
    http: httpx.AsyncClient, head: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_reader, "HAS_HEIC", False)
    reply = await send(http, plain(head))
    check_error(reply, 400, code="invalid_image", param="image")
    assert f"image; what was sent {says}" in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["pastel"], 'Write [{"name": "pastel", "scale": 1}].'),
        ("pastel", 'Write [{"name": "pastel", "scale": 1}].'),
        ({"pastel": 0.8}, 'Write [{"name": "pastel", "scale": 0.8}].'),
        ("pastel:0.8", 'Write [{"name": "pastel", "scale": 0.8}].'),
        ({"name": "pastel"}, 'Write [{"name": "pastel", "scale": 1}].'),
        ({"name": "pastel", "scale": 0.8}, 'Write [{"name": "pastel", "scale": 0.8}].'),
        ([{"pastel": 0.8}], 'is required; write [{"name": "pastel", "scale": 0.8}].'),
        ([{"name": "pastel", "scale": "0.8"}], "given '0.8'. Write 0.8 without quotes."),
        ([{"scale": 0.8}], "is required; add it."),
        ([0.5], "a list of objects"),
    ],
)
async def test_loras_in_other_shapes_are_refused_with_the_right_one(
    http: httpx.AsyncClient, given: object, says: str
) -> None:
    reply = await http.post("/v1/images/generations", json={"prompt": "x", "loras": given})
    assert reply.status_code == 400
    message = error_of(reply)["message"]
    assert says in message
    assert message.lower().count("write") == says.lower().count("write")
