"""Images that clients send: stored once, read by their owner alone, swept with care."""

from __future__ import annotations

import asyncio
import hashlib
import os
import string
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, Edit
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from ray_cluster.storage.inputs import (
    OPEN_OWNER,
    InputStore,
    InputTooLarge,
    input_name,
    input_names,
)
from tests.fakes import FakeClock, image_request
from tests.jobs.jobs_cell import until

GRACE_S = 1000.0
ALICE, BOB = "a" * 64, "b" * 64
IMAGE = b"\x89PNG" + bytes(range(256)) * 20


class Folder:
    """An input store and what lies in its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock(1e6 * GRACE_S)
        self.blobs = BlobStore(str(path))
        self.inputs = InputStore(self.blobs, grace_s=GRACE_S, wall_clock=self.clock)

    async def put(self, owner: str, data: bytes, max_bytes: int = 1 << 20) -> BlobRef:
        ref = await self.inputs.put(owner, pieces(data), max_bytes=max_bytes)
        self.date(f"{owner}.{ref.sha256}.{int(self.clock.now_s // GRACE_S) % 3}")
        return ref

    def date(self, name: str) -> None:
        """Let what was written now be as old as the fake clock says."""
        os.utime(self.path / name, (self.clock.now_s, self.clock.now_s))

    def sweep(self, keep: frozenset[str] = frozenset()) -> int:
        return self.inputs.sweep(sent_before_s=self.clock.now_s - GRACE_S, keep=keep)

    @property
    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(params=["folder", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "s3":
        return BlobStore(request.getfixturevalue("s3_bucket"))
    return BlobStore(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}")


async def pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_what_a_client_sends_is_read_by_that_client_alone(blobs: BlobStore) -> None:
    inputs = InputStore(blobs, grace_s=GRACE_S, wall_clock=time.time)
    ref = await inputs.put(ALICE, pieces(IMAGE), max_bytes=len(IMAGE))
    assert ref == BlobRef(hashlib.sha256(IMAGE).hexdigest(), len(IMAGE))
    assert inputs.get(ALICE, ref) == IMAGE
    assert inputs.get(BOB, ref) is None
    assert inputs.get(OPEN_OWNER, ref) is None
    assert await inputs.put(BOB, pieces(b""), max_bytes=0) == BlobRef(
        hashlib.sha256(b"").hexdigest(), 0
    )
    assert len(list(blobs.entries())) == 2
    assert inputs.sweep(sent_before_s=0.0, keep=()) == 0


async def test_the_same_bytes_are_stored_once_however_often_they_are_sent(folder: Folder) -> None:
    sent = [folder.inputs.put(ALICE, pieces(IMAGE), max_bytes=10**6) for _ in range(5)]
    refs = set(await asyncio.gather(*sent))
    assert len(refs) == 1
    assert len(folder.names) == 1
    await folder.put(BOB, IMAGE)
    assert len(folder.names) == 2


async def test_one_byte_too_many_leaves_nothing(folder: Folder) -> None:
    with pytest.raises(InputTooLarge, match=f"{len(IMAGE) - 1} bytes"):
        await folder.put(ALICE, IMAGE, max_bytes=len(IMAGE) - 1)
    await until(lambda: folder.names == [])


class Torn(Exception):
    """The client has gone."""


@pytest.mark.parametrize("num_bytes", [0, 10, 3 << 20])
async def test_an_upload_that_breaks_off_leaves_nothing(folder: Folder, num_bytes: int) -> None:
    async def torn() -> AsyncIterator[bytes]:
        yield bytes(num_bytes)
        raise Torn

    with pytest.raises(Torn):
        await folder.inputs.put(ALICE, torn(), max_bytes=10 << 20)
    await until(lambda: folder.names == [])


async def test_a_cancelled_upload_leaves_nothing_visible(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is cancelled while a thread writes, which then goes on."""
    may_write, is_writing = threading.Event(), threading.Event()
    real = folder.blobs._fs.open

    def slow(*args: object, **kwargs: object) -> object:
        file = real(*args, **kwargs)
        is_writing.set()
        may_write.wait(60)
        return file

    monkeypatch.setattr(folder.blobs._fs, "open", slow)
    upload = asyncio.create_task(
        folder.inputs.put(ALICE, pieces(bytes(3 << 20), 1 << 20), max_bytes=10 << 20)
    )
    await until(is_writing.is_set)
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert all(name.endswith(".part") for name in folder.names)
    may_write.set()
    await until(lambda: folder.names == [])


async def test_a_killed_upload_is_swept_and_never_read(folder: Folder) -> None:
    writer = folder.blobs.writer()
    writer.write(IMAGE)
    (name,) = folder.names
    folder.date(name)
    ref = BlobRef(hashlib.sha256(IMAGE).hexdigest(), len(IMAGE))
    assert folder.inputs.get(ALICE, ref) is None
    assert folder.sweep() == 0
    folder.clock.advance(GRACE_S + 1)
    assert folder.sweep() == 1
    assert folder.names == []
    writer.discard()


async def test_a_store_that_fails_says_so_and_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(folder.blobs._fs, "mv", fail)
        with pytest.raises(BlobStoreError, match="no space left"):
            await folder.put(ALICE, IMAGE)
        await until(lambda: folder.names == [])
    ref = await folder.put(ALICE, IMAGE)
    monkeypatch.setattr(folder.blobs._fs, "cat_file", fail)
    with pytest.raises(BlobStoreError, match="no space left"):
        folder.inputs.get(ALICE, ref)


async def test_bytes_that_changed_in_the_store_are_never_handed_out(folder: Folder) -> None:
    ref = await folder.put(ALICE, IMAGE)
    (entry,) = folder.path.iterdir()
    entry.write_bytes(IMAGE[:-1])
    with pytest.raises(BlobStoreError, match="damaged"):
        folder.inputs.get(ALICE, ref)


@given(owner=st.text(max_size=80), sha256=st.text(max_size=80))
def test_no_name_leads_elsewhere(owner: str, sha256: str) -> None:
    blobs = BlobStore("memory://inputs-of-any-name")
    inputs = InputStore(blobs, grace_s=GRACE_S, wall_clock=time.time)
    try:
        assert inputs.get(owner, BlobRef(sha256, 1)) is None
    except ValueError:
        pass
    else:
        assert set(owner + sha256) <= set(f"{string.ascii_letters}{string.digits}_-")


@pytest.mark.parametrize("owner", ["", "..", "../b", "a/b", "a.b", "a" * 65, "a\n", "ä"])
async def test_an_owner_is_a_digest(folder: Folder, owner: str) -> None:
    with pytest.raises(ValueError, match="no owner"):
        await folder.put(owner, IMAGE)
    with pytest.raises(ValueError, match="no name"):
        folder.inputs.get(owner, BlobRef("0" * 64, 1))
    assert folder.names == []


async def test_an_upload_takes_little_memory(folder: Folder) -> None:
    async def parts(count: int) -> AsyncIterator[bytes]:
        for index in range(count):
            yield bytes([index % 256]) * (64 << 10)

    # what the first one loads is not counted
    await folder.inputs.put(ALICE, parts(1), max_bytes=20 << 20)
    tracemalloc.start()
    try:
        ref = await folder.inputs.put(ALICE, parts(320), max_bytes=20 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ref.num_bytes == 20 << 20
    assert peak_bytes < 4 << 20, peak_bytes


def test_a_request_names_all_its_inputs() -> None:
    first, second, third = (BlobRef(digit * 64, 1) for digit in "123")
    control = AddOns(controls=(ControlNetUse("edges", first),))
    requests = [
        image_request(
            "a", owner=ALICE, add_ons=control, edit=Edit(second, (64, 64), 4, mask=third)
        ),
        image_request("b", owner=BOB, edit=Edit(second, (64, 64), 4)),
        image_request("c", owner=BOB),
    ]
    assert input_names(requests) == {
        *(input_name(ALICE, ref) for ref in (first, second, third)),
        input_name(BOB, second),
    }


# sweeps


async def test_an_input_stays_for_the_grace_age_and_goes_within_three_times_that(
    folder: Folder,
) -> None:
    folder.clock.advance(0.5 * GRACE_S)
    ref = await folder.put(ALICE, IMAGE)
    sent_s, step_s = folder.clock.now_s, GRACE_S / 20
    while folder.sweep() == 0:
        assert folder.inputs.get(ALICE, ref) == IMAGE
        folder.clock.advance(step_s)
    age_s = folder.clock.now_s - sent_s
    assert GRACE_S < age_s < 3 * GRACE_S
    assert folder.inputs.get(ALICE, ref) is None


async def test_an_input_that_is_named_stays_for_as_long_as_it_is(folder: Folder) -> None:
    ref = await folder.put(ALICE, IMAGE)
    other = await folder.put(BOB, IMAGE)
    for _ in range(200):
        folder.clock.advance(GRACE_S / 20)
        folder.sweep(frozenset([input_name(ALICE, ref)]))
    assert folder.inputs.get(ALICE, ref) == IMAGE
    assert folder.inputs.get(BOB, other) is None
    for _ in range(60):
        folder.clock.advance(GRACE_S / 20)
        folder.sweep()
    assert folder.names == []


async def test_the_age_starts_anew_when_the_same_bytes_are_sent_again(folder: Folder) -> None:
    ref = await folder.put(ALICE, IMAGE)
    for _ in range(20):
        folder.clock.advance(0.9 * GRACE_S)
        folder.sweep()
        assert folder.inputs.get(ALICE, ref) == IMAGE
        assert await folder.put(ALICE, IMAGE) == ref
        # older copies go
        assert len(folder.names) <= 3


@pytest.mark.parametrize("at", [0.0, 0.3, 0.74, 0.76, 0.99])
async def test_what_is_sent_again_while_a_sweep_is_at_it_stays(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    """The sweep has seen the old entry, and deletes it after the same bytes have come again."""
    for _ in range(3):
        ref = await folder.put(ALICE, IMAGE)
        folder.clock.advance(GRACE_S)
    folder.clock.advance((3 + at) * GRACE_S)
    real, loop = folder.blobs.delete, asyncio.get_running_loop()

    def late(names: list[str]) -> None:
        again = folder.inputs.put(ALICE, pieces(IMAGE), max_bytes=10**6)
        assert asyncio.run_coroutine_threadsafe(again, loop).result(60) == ref
        real(names)

    monkeypatch.setattr(folder.blobs, "delete", late)
    num_deleted = await asyncio.to_thread(folder.sweep)
    assert num_deleted == (1 if at < 0.75 else 0)
    assert folder.inputs.get(ALICE, ref) == IMAGE


async def test_a_sweep_leaves_what_is_not_an_input(folder: Folder) -> None:
    names = ["readme.txt", f"{ALICE}.{'0' * 64}.3", f"{ALICE}.{'0' * 63}.1", "results.png"]
    for name in names:
        (folder.path / name).write_bytes(b"somebody else's")
    for _ in range(100):
        folder.clock.advance(GRACE_S / 10)
        assert folder.sweep() == 0
    assert folder.names == sorted(names)


async def test_an_input_that_is_renewed_is_kept_as_if_it_were_sent_now(folder: Folder) -> None:
    ref = await folder.put(ALICE, IMAGE)
    folder.clock.now_s += GRACE_S
    assert folder.inputs.renew(ALICE, ref)
    assert sorted(name[-1] for name in folder.names) == ["1", "2"]
    folder.clock.now_s += GRACE_S
    assert folder.sweep() == 1
    assert folder.inputs.get(ALICE, ref) == IMAGE
    # nor is there one more for each time
    for _ in range(3):
        assert folder.inputs.renew(ALICE, ref)
    assert len(folder.names) == 2


async def test_within_a_period_only_the_time_of_a_renewed_input_changes(folder: Folder) -> None:
    ref = await folder.put(ALICE, IMAGE)
    (name,) = folder.names
    before = folder.blobs.find(name)
    assert folder.inputs.renew(ALICE, ref)
    after = folder.blobs.find(name)
    assert before is not None
    assert after is not None
    assert (after.num_bytes, folder.names) == (before.num_bytes, [name])
    assert after.changed_s != before.changed_s


async def test_what_is_not_there_is_not_renewed(blobs: BlobStore) -> None:
    clock = FakeClock(5 * GRACE_S)
    inputs = InputStore(blobs, grace_s=GRACE_S, wall_clock=clock)
    ref = await inputs.put(ALICE, pieces(IMAGE), max_bytes=len(IMAGE))
    assert not inputs.renew(BOB, ref)
    assert not inputs.renew(ALICE, BlobRef(ref.sha256, ref.num_bytes - 1))
    assert not inputs.renew(ALICE, BlobRef("0" * 64, ref.num_bytes))
    clock.now_s += GRACE_S
    assert inputs.renew(ALICE, ref)
    assert inputs.get(ALICE, ref) == IMAGE
