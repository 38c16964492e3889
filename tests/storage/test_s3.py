"""Stores in S3: what is of S3 alone. What all stores do: test_blob_store.py, test_inputs.py."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_cluster.cell.front import Stores
from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.models.sources.lora_sources import Bounds, fetch
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError, StoreRefuses
from tests.cell.local_service import running_locally
from tests.cell.test_loras import until
from tests.e2e.jobs import create, images_of
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import HEADERS, LIGHT_POOL, free_ports, image_request, images, post
from tests.storage.s3_server import PAGE, REGION, S3Server, use

# of what a test's service has: they need models that are not there
NO_ADD_ONS: dict[str, Any] = {"cascades": [], "discriminators": [], "loras": {"num_stores": 0}}


@pytest.fixture
def bucket(s3_bucket: str) -> str:
    """The name of an empty bucket."""
    return s3_bucket.removeprefix("s3://")


def storage(folder: Path, bucket: str) -> dict[str, str]:
    """Return the stores of a service that has all but its jobs in a bucket."""
    places = {name: f"s3://{bucket}/{name}" for name in ("results", "states", "inputs")}
    return {"jobs": f"sqlite:///{folder}/jobs.db", **places}


def test_what_another_process_writes_and_deletes_is_seen_at_once(s3: S3Server, bucket: str) -> None:
    """A listing of before would be answered from."""
    store = BlobStore(f"s3://{bucket}/results")
    store.put("a.png", b"one")
    assert [blob.name for blob in store.entries()] == ["a.png"]
    assert store._fs.s3.meta.region_name == REGION
    other = s3._client("s3")
    other.put_object(Bucket=bucket, Key="results/b.png", Body=b"four")
    other.put_object(Bucket=bucket, Key="results/a.png", Body=b"fourteen")
    assert (store.num_bytes("a.png"), store.num_bytes("b.png")) == (8, 4)
    other.delete_object(Bucket=bucket, Key="results/a.png")
    assert (store.get("a.png"), store.find("a.png")) == (None, None)


def test_more_entries_than_s3_lists_at_a_time(s3: S3Server, bucket: str) -> None:
    store = BlobStore(f"s3://{bucket}/results")
    for index in range(3 * PAGE):
        store.put(f"f{index}", b"0123456789")
    assert len(list(store.entries())) == 3 * PAGE
    assert store.sweep(before_s=0.0, max_bytes=20 * PAGE) == PAGE
    assert len(list(store.entries())) == 2 * PAGE


def test_large_entries_go_in_parts_and_leave_none(s3: S3Server, bucket: str) -> None:
    store, piece = BlobStore(f"s3://{bucket}/inputs"), bytes(range(256)) * 4096
    written, given_up = store.writer(), store.writer()
    for _ in range(20):
        written.write(piece)
        given_up.write(piece)
    assert s3.names(bucket) == []
    written.commit("a")
    given_up.discard()
    assert store.get("a") == piece * 20
    assert s3.names(bucket) == ["inputs/a"]
    assert s3.open_uploads(bucket) == 0


def test_a_lora_is_fetched_from_s3_as_it_is_now(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    store, folder = BlobStore(f"s3://{bucket}/loras"), f"s3://{bucket}/loras"

    def fetched(name: str) -> bytes:
        fetch(f"{folder}/{name}", (folder,), tmp_path / "copy", Bounds(1 << 24))
        return (tmp_path / "copy").read_bytes()

    for content in (bytes(range(256)) * 12_000, b"renewed"):
        store.put("a.safetensors", content)
        assert fetched("a.safetensors") == content
    with pytest.raises(OSError, match=r"b\.safetensors does not give the file"):
        fetched("b.safetensors")


def refusal(folder: Path, bucket: str) -> str:
    """Return what whoever starts a service is told."""
    with pytest.raises(StoreRefuses) as refused:
        Stores.open(StorageConfig(**storage(folder, bucket)))
    assert not (folder / "jobs.db").exists()
    return str(refused.value)


def test_a_bucket_that_is_missing_is_told_at_the_start(s3: S3Server, tmp_path: Path) -> None:
    text = refusal(tmp_path, "no-such-bucket")
    assert re.fullmatch(
        r"cannot use s3://no-such-bucket/\w+: The specified bucket does not exist", text
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"secret": "wrong"}, "signature"),
        ({"key": "AKIAWRONG"}, "does not exist in our records"),
    ],
)
def test_wrong_credentials_are_told_at_the_start(
    s3: S3Server,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    told: str,
) -> None:
    replace(s3, **change).use(monkeypatch)
    text = refusal(tmp_path, bucket)
    assert text.startswith(f"cannot use s3://{bucket}/")
    assert told in text
    assert "wrong" not in text.lower().replace("akiawrong", "")


def test_missing_credentials_are_told_at_the_start(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
    assert "Unable to locate credentials" in refusal(tmp_path, bucket)


@contextmanager
def nothing() -> Iterator[int]:
    """A port that nothing listens on."""
    yield free_ports(1)[0]


@contextmanager
def silence() -> Iterator[int]:
    """A port where calls are taken and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(("server", "told"), [(nothing, "Could not connect"), (silence, "timeout")])
def test_a_server_that_is_down_or_silent_delays_a_start_for_seconds(
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    server: Callable[[], Iterator[int]],
    told: str,
) -> None:
    monkeypatch.setattr("ray_cluster.storage.s3.SILENCE_S", 0.1)
    monkeypatch.setattr("ray_cluster.storage.checks._PATIENCE_S", 1.0)
    begun_s = time.monotonic()
    with server() as port:
        replace(s3, endpoint=f"http://127.0.0.1:{port}").use(monkeypatch)
        stores = Stores.open(StorageConfig(**storage(tmp_path, "images")))
        assert "the service starts without it" in caplog.text
        for call in (
            lambda: stores.results.put("a", bytes(1000)),
            lambda: list(stores.results.entries()),
        ):
            with pytest.raises(BlobStoreError, match=told):
                call()
        assert time.monotonic() - begun_s < 30
    stores.jobs.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_service_has_its_images_states_and_inputs_in_s3(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    pool = LIGHT_POOL | {"max_num_inference_steps": 60}
    given = {"storage": storage(tmp_path, bucket), "pools": [pool], **NO_ADD_ONS}
    seen: set[str] = set()

    def is_done() -> bool:
        seen.update(name.partition("/")[0] for name in s3.names(bucket))
        return client.get(f"/v1/jobs/{job_id}").json()["state"] == "completed"

    with (
        running_locally(tmp_path, **given) as service,
        httpx.Client(base_url=service.url, headers=HEADERS, timeout=60) as client,
    ):
        [image] = images(post(service, seed=3, num_inference_steps=60, slo_s=600))
        job_id = create(service, 3, num_inference_steps=60)
        until(is_done, "the job")
        [stored] = images_of(service, [job_id]).values()
        assert pixels_differ(stored, image) <= 1
        assert {"results", "states"} <= seen
        files = {"image": ("image.png", image, "image/png")}
        fields = {"prompt": image_request()["prompt"], "response_format": "url"}
        edit = client.post("/v1/images/edits", files=files, data=fields)
        assert edit.status_code == 200, edit.text
        edited = client.get(edit.json()["data"][0]["url"])
        assert edited.headers["content-type"] == "image/png"
        assert pixels_differ(edited.content, image) > 1
        left = [name.partition("/")[0] for name in s3.names(bucket)]
        assert sorted(left) == ["inputs", "results", "results"]
