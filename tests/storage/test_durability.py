"""What a power failure leaves of a store in a folder: all that was written to it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from ray_cluster.storage.inputs import InputStore
from tests.storage.syncs import Syncs


def test_an_entry_is_on_the_disk_before_it_has_its_name_and_its_name_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, syncs = BlobStore(str(tmp_path)), Syncs(tmp_path)
    syncs.patch(monkeypatch)
    store.put("a.png", b"one")
    assert syncs.end_with("a.png")
    store.copy("a.png", "b.png")
    assert syncs.end_with("b.png")
    writer = store.writer()
    writer.write(b"two")
    writer.commit("c.png")
    assert syncs.end_with("c.png")
    assert len(syncs.seen) == 6
    store.rename("a.png", "d.png")
    assert syncs.seen[6:] == [(tmp_path, {"b.png", "c.png", "d.png"})]
    # what was renamed before may not be on the disk yet
    store.rename("a.png", "d.png")
    assert len(syncs.seen) == 8


def test_a_new_folder_is_on_the_disk_once_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(tmp_path)
    syncs.patch(monkeypatch)
    for _ in range(2):
        BlobStore(str(tmp_path / "new" / "folder"))
        assert {path for path, _ in syncs.seen} == {tmp_path, tmp_path / "new"}
        assert len(syncs.seen) == 2


def test_what_need_not_be_durable_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, syncs = BlobStore(str(tmp_path), is_durable=False), Syncs(tmp_path)
    syncs.patch(monkeypatch)
    store.put("a", b"one")
    store.rename("a", "b")
    assert (store.get("b"), syncs.seen) == (b"one", [])


def test_a_file_system_that_cannot_sync_folders_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, code = os.fsync, errno.EINVAL

    def fail(number: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{number}"):
            raise OSError(code, os.strerror(code))
        real(number)

    monkeypatch.setattr(os, "fsync", fail)
    store = BlobStore(str(tmp_path))
    store.put("a.png", b"one")
    # but a disk that fails has not taken the entry
    code = errno.EIO
    with pytest.raises(BlobStoreError, match=os.strerror(errno.EIO)):
        store.put("b.png", b"two")


def test_what_a_disk_does_not_take_has_no_name_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = BlobStore(str(tmp_path))
    store.put("a.png", b"one")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BlobStoreError, match=r"did not take a\.png: .*No space"):
        store.put("a.png", b"two")
    with pytest.raises(BlobStoreError, match=r"did not copy a\.png: .*No space"):
        store.copy("a.png", "b.png")
    assert store.get("a.png") == b"one"
    assert os.listdir(tmp_path) == ["a.png"]


async def test_no_event_loop_waits_for_the_disk_while_an_image_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, syncs = InputStore.open(str(tmp_path), grace_s=60.0), Syncs(tmp_path)
    syncs.patch(monkeypatch)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"an image"

    ref = await inputs.put("alice", chunks(), max_bytes=99)
    assert inputs.get("alice", ref) == b"an image"
    assert len(syncs.seen) == 2
    assert threading.get_ident() not in syncs.threads


def test_errors_of_every_kind_are_those_of_the_store() -> None:
    class CredentialsMissing(Exception):
        """As botocore's: of no kind that is known here."""

    def fail(*_: object, **_options: object) -> None:
        raise CredentialsMissing("no credentials")

    store = BlobStore("memory://failing-in-its-own-way")
    store._fs = type("Failing", (), {"__getattr__": lambda _self, _name: fail})()
    writer = store.writer()
    for call in (
        lambda: store.put("a", b""),
        lambda: store.get("a"),
        lambda: store.delete(["a"]),
        lambda: store.find("a"),
        lambda: store.rename("a", "b"),
        lambda: list(store.entries()),
        lambda: writer.write(b""),
    ):
        with pytest.raises(BlobStoreError, match="no credentials"):
            call()
