"""Named bytes: whole or not there, in a folder and in an object store's way."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from ray_cluster.storage.blob_store import BlobStore, BlobStoreError


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return BlobStore(str(tmp_path / "new" / "folder"))
    if request.param == "s3":
        return BlobStore(f"{request.getfixturevalue('s3_bucket')}/new/folder")
    return BlobStore(f"memory://{tmp_path.name}-{request.node.name}")


def names(store: BlobStore) -> set[str]:
    return {blob.name for blob in store.entries()}


def test_what_is_put_is_there_until_it_is_deleted(store: BlobStore) -> None:
    assert store.get("a.png") is None
    store.put("a.png", b"one")
    store.put("b.png", b"")
    assert store.get("a.png") == b"one"
    assert store.get("b.png") == b""
    store.put("a.png", b"two")
    assert store.get("a.png") == b"two"
    sizes = {blob.name: blob.num_bytes for blob in store.entries()}
    assert sizes == {"a.png": 3, "b.png": 0}
    assert {name: store.num_bytes(name) for name in (*sizes, "c.png")} == {**sizes, "c.png": None}
    assert (store.get("a.png", 2), store.get("b.png", 2), store.get("c.png", 2)) == (
        b"tw",
        b"",
        None,
    )
    store.delete(["a.png", "nothing.png"])
    assert store.get("a.png") is None
    assert names(store) == {"b.png"}


def test_a_copy_and_a_new_name_take_the_place_of_what_was_there(store: BlobStore) -> None:
    for name in ("a", "b"):
        store.put(name, name.encode())
    assert store.copy("a", "b")
    assert store.copy("a", "a")
    assert not store.copy("nothing", "b")
    assert (store.get("a"), store.get("b")) == (b"a", b"a")
    store.put("b", b"b")
    for _ in range(2):
        store.rename("b", "a")
    assert (store.get("a"), names(store)) == (b"b", {"a"})
    with pytest.raises(BlobStoreError, match="did not rename"):
        store.rename("nothing", "other")


def test_a_check_leaves_nothing(store: BlobStore) -> None:
    store.check()
    assert names(store) == set()


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a\0", "x" * 300, "a b"])
def test_a_name_cannot_lead_elsewhere(store: BlobStore, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        store.put(name, b"")
    with pytest.raises(ValueError, match="no name"):
        store.get(name)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    store.put("a.png", b"one")
    real = store._fs.mv

    def fail(*_: object) -> None:
        raise OSError("no space left")

    store._fs.mv = fail
    try:
        with pytest.raises(BlobStoreError, match="no space left"):
            store.put("a.png", b"two")
    finally:
        store._fs.mv = real
    assert store.get("a.png") == b"one"
    assert os.listdir(tmp_path) == ["a.png"]


def test_what_is_written_in_pieces_is_there_once_it_is_committed(store: BlobStore) -> None:
    writer, other = store.writer(), store.writer()
    for piece in (b"one", b"", b" and two"):
        writer.write(piece)
        other.write(piece)
    assert store.get("a.png") is None
    writer.commit("a.png")
    assert store.get("a.png") == b"one and two"
    other.discard()
    assert names(store) == {"a.png"}
    store.writer().commit("b.png")
    assert store.get("b.png") == b""
    with pytest.raises(ValueError, match="no name"):
        store.writer().commit("../a")


def test_a_writer_that_has_ended_writes_no_more(store: BlobStore) -> None:
    ended, never = store.writer(), store.writer()
    ended.write(b"one")
    ended.commit("a.png")
    ended.discard()
    never.discard()
    for writer in (ended, never):
        with pytest.raises(BlobStoreError, match="already"):
            writer.write(b"two")
        with pytest.raises(BlobStoreError, match="already"):
            writer.commit("b.png")
    assert names(store) == {"a.png"}
    assert store.get("a.png") == b"one"


def test_a_sweep_takes_the_old_and_then_the_oldest(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    for index in range(6):
        store.put(f"f{index}", bytes(10))
        os.utime(tmp_path / f"f{index}", (1000 + index, 1000 + index))
    (tmp_path / "not one of ours").write_bytes(bytes(99))
    (tmp_path / "folder").mkdir()
    assert store.sweep(before_s=1002) == 2
    assert names(store) == {"f2", "f3", "f4", "f5"}
    assert store.sweep(before_s=0, max_bytes=25) == 2
    assert store.sweep(before_s=0, max_bytes=20) == 0
    assert names(store) == {"f4", "f5"}
    assert (tmp_path / "not one of ours").exists()


def test_a_sweep_takes_as_little_memory_for_many_entries(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    for index in range(6000):
        path = tmp_path / f"image-{index:06}.png"
        path.write_bytes(b"png")
        os.utime(path, (1e9 + index, 1e9 + index))
    tracemalloc.start()
    try:
        assert store.sweep(before_s=1e9 + 2000, max_bytes=3 * 500) == 5500
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert names(store) == {f"image-{index:06}.png" for index in range(5500, 6000)}
    # all of them at once take 6 MB as fsspec lists them
    assert peak_bytes < 1 << 20, peak_bytes


def test_a_place_that_cannot_be_is_refused() -> None:
    with pytest.raises(BlobStoreError, match="cannot use"):
        BlobStore("/proc/nowhere")
    with pytest.raises(BlobStoreError, match="cannot use"):
        BlobStore("gopher://hole")


def test_a_store_that_goes_away_says_so(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path / "results"))
    (tmp_path / "results").rmdir()
    (tmp_path / "results").write_bytes(b"a file now")
    with pytest.raises(BlobStoreError, match="did not take"):
        store.put("a.png", b"one")
