"""A form means the same however it arrives, and takes little memory."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from ray_cluster.api.errors import ApiError
from ray_cluster.api.input.form_reader import Form, Uploads
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import OPEN_OWNER, InputStore
from tests.api.upload_app import JPEG, PNG, ref_of
from tests.jobs.jobs_cell import until

BOUNDARY = "--b"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def store_in(url: str) -> InputStore:
    return InputStore(BlobStore(url), grace_s=3600.0, wall_clock=time.time)


def request_of(chunks: Iterable[bytes]) -> Request:
    left = iter(chunks)

    async def receive() -> Message:
        # so that others run in between, as with a socket
        await asyncio.sleep(0)
        chunk = next(left, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    headers = [(b"content-type", CONTENT_TYPE.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {}}
    return Request(scope, receive)


def split(body: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({cut % (len(body) + 1) for cut in cuts} | {0, len(body)})
    for start, end in pairwise(places):
        yield body[start:end]


def form_body(parts: list[tuple[str, tuple[str | None, bytes]]]) -> bytes:
    headers = {"content-type": CONTENT_TYPE}
    return httpx.Request("POST", "http://x", files=parts, headers=headers).read()


# what a boundary could be taken for
TRICKY = (
    st.lists(
        st.sampled_from(
            [b"\r", b"\n", b"\r\n", b"-", b"--", b"----b", b"--b", b"--\r\n", b"x", b"\0"]
        ),
        max_size=30,
    )
    .map(b"".join)
    .filter(lambda data: b"\r\n----b" not in data)
)


@settings(max_examples=50, deadline=None)
@given(
    tails=st.lists(TRICKY, min_size=1, max_size=3),
    prompt=st.text(min_size=1, max_size=50),
    cuts=st.lists(st.integers(0, 10**6), max_size=60),
)
def test_a_form_is_read_as_it_was_sent_however_it_is_cut(
    tails: list[bytes], prompt: str, cuts: list[int]
) -> None:
    images = [JPEG[:40] + tail for tail in tails]
    parts: list[tuple[str, tuple[str | None, bytes]]] = [
        ("image[]", ("f", data)) for data in images
    ]
    body = form_body([("prompt", (None, prompt.encode())), *parts])
    inputs = store_in("memory://cut-forms")

    async def read() -> Form:
        return await Uploads(inputs, LimitsConfig()).read_form(
            request_of(split(body, cuts)), {"image": 3}
        )

    form = asyncio.run(read())
    assert form == Form({"prompt": prompt}, {"image": tuple(map(ref_of, images))})
    assert [inputs.get(OPEN_OWNER, ref) for ref in form.images["image"]] == images


@settings(max_examples=50, deadline=None)
@given(
    body=st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.sampled_from(
                [
                    *(b"----b", b"\r\n", b"--", b":", b"Content-Disposition: form-data"),
                    *(b"; name=a", b"; filename=f", b'"', b"x", b"\xff", b" ", PNG[:30]),
                ]
            ),
            max_size=40,
        ).map(b"".join),
    ),
    cuts=st.lists(st.integers(0, 10**6), max_size=10),
)
def test_any_bytes_are_a_form_or_refused(body: bytes, cuts: list[int]) -> None:
    async def read() -> Form:
        uploads = Uploads(store_in("memory://any-bytes"), LimitsConfig())
        return await uploads.read_form(request_of(split(body, cuts)), {"a": 1})

    try:
        asyncio.run(read())
    except InvalidRequest as error:
        is_told = error.message.endswith(".")
    else:
        is_told = True
    assert is_told


@pytest.mark.parametrize("image", [b"GIF89a", PNG + bytes(5000)])
async def test_the_rest_of_a_refused_form_is_read(image: bytes) -> None:
    """Some servers close a connection on which something is left, and the reply is lost."""
    body = form_body([("image", ("f", image)), ("mask", ("f", PNG))])
    left = iter([body[start : start + 100] for start in range(0, len(body), 100)])
    uploads = Uploads(store_in("memory://refused"), LimitsConfig(max_input_bytes=5000))
    with pytest.raises((ApiError, InvalidRequest)):
        await uploads.read_form(request_of(left), {"image": 1, "mask": 1})
    assert next(left, None) is None


async def test_a_large_form_takes_little_memory(tmp_path: Path) -> None:
    inputs = store_in(str(tmp_path))
    chunk = bytes(range(256)) * 256
    start, end = form_body([("image", ("f", b"IMAGE"))]).split(b"IMAGE")

    def chunks() -> Iterator[bytes]:
        yield start + PNG[:8]
        for _ in range(320):
            yield chunk
        yield end

    tracemalloc.start()
    try:
        form = await Uploads(inputs, LimitsConfig()).read_form(request_of(chunks()), {"image": 1})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    [ref] = form.images["image"]
    assert ref == ref_of(PNG[:8] + chunk * 320)
    assert ref.num_bytes > 20 << 20
    assert peak_bytes < 5 << 20, peak_bytes


@pytest.mark.parametrize("num_chunks", [1, 40, 200])
async def test_a_cancelled_call_leaves_nothing(tmp_path: Path, num_chunks: int) -> None:
    start, _ = form_body([("image", ("f", b"IMAGE"))]).split(b"IMAGE")
    has_all = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield start + PNG
        for _ in range(num_chunks):
            yield bytes(64 << 10)
        has_all.set()
        await asyncio.Event().wait()

    left = body()

    async def receive() -> Message:
        return {"type": "http.request", "body": await anext(left), "more_body": True}

    request = Request(request_of([]).scope, receive)
    uploads = Uploads(store_in(str(tmp_path)), LimitsConfig())
    reading = asyncio.create_task(uploads.read_form(request, {"image": 1}))
    await has_all.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: list(tmp_path.iterdir()) == [])
