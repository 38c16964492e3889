"""How much of what a client sends is kept: each client has a bound of its own, at every door."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ray_cluster.api.app import create_app
from ray_cluster.api.errors import ApiError
from ray_cluster.api.input.image_store import ClientInputs, StoredBytes
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.keys import KeyConfig
from ray_cluster.errors import ConfigError
from ray_cluster.requests import BlobRef
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore
from tests.api.checks import check_error, error_of
from tests.api.conftest import http_of, shapes_profile
from tests.api.edit_calls import EDITS, PROMPT, coded
from tests.fakes import FakeClock, FakeDispatcherClient, PlainChecks, memory_results, settings_for
from tests.imaging.pictures import file_of
from tests.keys import bearer, with_keys

MIB, GRACE_S = 1 << 20, 1000.0
FILES, PREPROCESS = "/v1/files", "/v1/preprocess"


def picture(seed: int) -> bytes:
    """An image of 360 kB."""
    return file_of(np.random.default_rng(seed).integers(0, 256, (300, 400, 3), np.uint8))


@pytest.fixture
async def http(config: ClusterConfig, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that keeps a MiB for each of its clients."""
    names = ("max_stored_bytes_per_client", "max_upload_bytes", "max_input_bytes")
    changes = {"limits": config.limits.model_copy(update=dict.fromkeys(names, MIB))}
    keys = [KeyConfig.of(name, name, ["use"]) for name in ("a", "b")]
    app = create_app(
        FakeDispatcherClient(shapes_profile()),
        settings_for(with_keys(config.model_copy(update=changes), *keys)),
        results=memory_results(),
        images=SentImages(InputStore.open(str(tmp_path), grace_s=3600.0), PlainChecks()),
    )
    async with http_of(app) as client:
        yield client


async def upload(http: httpx.AsyncClient, client: str, data: bytes) -> httpx.Response:
    files, fields = {"file": ("a.png", data)}, {"purpose": "vision"}
    return await http.post(FILES, files=files, data=fields, headers=bearer(client))


async def edit(http: httpx.AsyncClient, client: str, image: str) -> httpx.Response:
    body = {"prompt": PROMPT, "image": image}
    return await http.post(EDITS, json=body, headers=bearer(client))


async def test_what_a_client_sends_and_never_uses_is_bounded(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert [(await upload(http, "a", picture(n))).status_code for n in range(2)] == [200] * 2
    refused = await upload(http, "a", picture(2))
    check_error(refused, 429, code="too_many_stored_images")
    assert "limits.max_stored_bytes_per_client" in error_of(refused)["message"]
    # by no other door, either
    form = {"image": ("a.png", picture(3))}
    for url, fields in ((EDITS, {"prompt": PROMPT}), (PREPROCESS, {"preprocess": "canny"})):
        reply = await http.post(url, files=form, data=fields, headers=bearer("a"))
        check_error(reply, 429, code="too_many_stored_images")
    check_error(await edit(http, "a", coded(picture(4))), 429, code="too_many_stored_images")
    assert len(await asyncio.to_thread(os.listdir, tmp_path)) == 2
    # others have their own
    assert (await upload(http, "b", picture(2))).status_code == 200
    assert (await edit(http, "b", coded(picture(5)))).status_code == 200


async def test_a_stored_image_may_be_used_again_and_again(http: httpx.AsyncClient) -> None:
    uploaded = [(await upload(http, "a", picture(n))).json()["id"] for n in range(2)]
    for file_id in uploaded * 3:
        reply = await edit(http, "a", file_id)
        assert reply.status_code == 200, reply.text


async def test_maps_count_too(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"preprocess": "none", "size": "800x600"}
    form = {"image": ("a.png", picture(0))}
    reply = await http.post(PREPROCESS, files=form, data=fields, headers=bearer("a"))
    check_error(reply, 429, code="too_many_stored_images")


class Client:
    """Images of one client, and the counter of its gateway."""

    def __init__(self) -> None:
        self.clock = FakeClock(50 * GRACE_S)
        self.stored = StoredBytes(GRACE_S, self.clock)

    async def send(self, num_bytes: int, most: int = MIB) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(num_bytes // 1024):
                yield bytes(1024)

        async with self.stored.arriving("a", chunks(), most) as counted:
            async for _ in counted:
                pass

    def note(self, name: str, num_bytes: int) -> None:
        self.stored.note("a", BlobRef(name * 64, num_bytes))


async def test_an_image_counts_until_it_is_deleted() -> None:
    one = Client()
    one.note("0", MIB // 2)
    one.clock.now_s += GRACE_S
    # sent again, it is there twice, however often
    one.note("0", MIB // 2)
    one.note("0", MIB // 2)
    assert one.stored.of("a") == MIB
    with pytest.raises(ApiError, match="would take 1114112 bytes; at most 1048576"):
        await one.send(2048)
    one.clock.now_s += GRACE_S
    assert one.stored.of("a") == MIB // 2
    one.clock.now_s += GRACE_S
    assert one.stored.of("a") == 0
    assert one.stored.of("b") == 0


async def test_images_that_arrive_at_once_count_together_and_not_when_they_fail() -> None:
    one = Client()

    async def slow() -> AsyncIterator[bytes]:
        while True:
            yield bytes(MIB // 2)

    async with one.stored.arriving("a", slow(), MIB) as first:
        await anext(first)
        await one.send(MIB // 2)
        assert one.stored.of("a") == MIB // 2
        with pytest.raises(ApiError):
            await one.send(MIB // 2 + 1024)
    assert one.stored.of("a") == 0
    await one.send(MIB)


class SlowInputs(InputStore):
    """Commits once it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(BlobStore(str(folder)), grace_s=GRACE_S, wall_clock=FakeClock(0.0))
        self.may_commit = asyncio.Event()

    async def put(self, owner: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> BlobRef:
        data = b"".join([chunk async for chunk in chunks])
        await self.may_commit.wait()
        return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


@pytest.mark.parametrize("num_bytes", [MIB // 4, 1])
async def test_images_that_wait_for_a_slow_store_count(tmp_path: Path, num_bytes: int) -> None:
    one, inputs = Client(), SlowInputs(tmp_path)
    mine = ClientInputs(inputs, one.stored, "a", MIB)

    async def put(n: int) -> BlobRef:
        async def chunks() -> AsyncIterator[bytes]:
            yield bytes([n]) * num_bytes

        return await mine.put("a", chunks(), max_bytes=MIB)

    calls = [asyncio.create_task(put(n)) for n in range(32)]
    await asyncio.sleep(0.01)
    inputs.may_commit.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    num_stored = sum(isinstance(result, BlobRef) for result in results)
    assert num_stored == (4 if num_bytes > 1 else 16)
    assert one.stored.of("a") == MIB


async def test_an_image_whose_client_leaves_while_it_is_committed_counts(tmp_path: Path) -> None:
    one = Client()
    mine = ClientInputs(SlowInputs(tmp_path), one.stored, "a", MIB)

    async def chunks() -> AsyncIterator[bytes]:
        yield bytes(MIB)

    call = asyncio.create_task(mine.put("a", chunks(), max_bytes=MIB))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert one.stored.of("a") == MIB


class SlowRenewals(InputStore):
    """Renews once so many have begun."""

    def __init__(self, folder: Path, at_once: int, *, is_there: bool) -> None:
        super().__init__(BlobStore(str(folder)), grace_s=GRACE_S, wall_clock=FakeClock(0.0))
        self.begun = threading.Barrier(at_once)
        self.is_there = is_there

    def renew(self, owner: str, ref: BlobRef) -> bool:
        self.begun.wait(5.0)
        return self.is_there


@pytest.mark.parametrize("is_there", [True, False])
def test_images_that_are_renewed_at_once_count_together(tmp_path: Path, is_there: bool) -> None:
    one = Client()

    def renew(number: int, at_once: SlowRenewals, most: int = MIB) -> bool | None:
        try:
            return ClientInputs(at_once, one.stored, "a", most).renew(
                "a", BlobRef(f"{number:064}", MIB // 4)
            )
        except ApiError:
            return None

    inputs = SlowRenewals(tmp_path, 4, is_there=is_there)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: renew(number, inputs), range(8 if is_there else 4)))
    assert found.count(is_there) == 4
    # those that are not there count no more
    assert one.stored.of("a") == (MIB if is_there else 0)
    # a second time in the same period costs nothing
    again = SlowRenewals(tmp_path, 1, is_there=True)
    assert renew(found.index(is_there), again)


def test_the_number_of_images_is_bounded_too() -> None:
    one = Client()
    for name in "0123456789abcdef":
        one.note(name, 10)
    assert one.stored.of("a") == MIB


def test_a_bound_below_one_call_is_refused() -> None:
    pools = [{"name": "shapes", "model": "shapes-sd"}]
    with pytest.raises(ConfigError, match="max_stored_bytes_per_client 2048 is below"):
        load_config({"pools": pools, "limits": {"max_stored_bytes_per_client": 2048}})
