"""Images on their way into a result store that fails."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_cluster.api.output.error_answers import from_failure
from ray_cluster.engine.stages.events import Decoded
from ray_cluster.errors import RequestFailed
from ray_cluster.replica import retries
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.unexpected import failure_of
from ray_cluster.requests import ImageRequest, Timing
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from tests.fakes import image_request
from tests.storage.syncs import Syncs

PATH = "/secret/place"


class Coder:
    """Codes everything into the same bytes."""

    def submit(self, *_: object) -> Future[bytes]:
        coded: Future[bytes] = Future()
        coded.set_result(b"png")
        return coded


class Store:
    """Fails a number of times."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise BlobStoreError(f"{PATH} did not take {name}")
        self.kept[name] = data


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "JOB_RETRY_S"):
        monkeypatch.setattr(retries, name, tuple(0.001 for _ in getattr(retries, name)))


def stored(job_id: str) -> ImageRequest:
    request = image_request(job_id=job_id)
    return replace(request, output=replace(request.output, is_stored=True))


def decoded(request: ImageRequest) -> Decoded:
    return Decoded(request, np.zeros((8, 8, 3), np.uint8), Timing(0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(("job_id", "num_failures"), [("", 3), ("job-1", 7)])
async def test_an_image_outlasts_a_store_that_fails_for_a_while(
    job_id: str, num_failures: int
) -> None:
    store, request = Store(num_failures), stored(job_id)
    result = await Delivery(Coder(), store).deliver(decoded(request))
    assert store.kept == {request.file_id: b"png"}
    assert (result.data, result.num_bytes) == (b"", 3)


async def test_an_image_is_on_the_disk_before_it_is_finished_and_no_event_loop_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery, request = Delivery(Coder(), BlobStore(str(tmp_path))), stored("job-1")
    syncs = Syncs(tmp_path)
    syncs.patch(monkeypatch)
    await delivery.deliver(decoded(request))
    assert syncs.end_with(request.file_id)
    assert threading.get_ident() not in syncs.threads


async def test_an_image_that_is_given_up_between_two_tries_is_not_stored() -> None:
    request = stored("job-1")

    class Leaving(Store):
        """Hears of the end of its request while it fails."""

        def put(self, name: str, data: bytes) -> None:
            deliverer.note_end(request.request_id)
            super().put(name, data)

    store = Leaving(1)
    deliverer = Delivery(Coder(), store)
    await deliverer.deliver(decoded(request))
    assert store.kept == {}


@pytest.mark.parametrize(("job_id", "num_failures"), [("", 4), ("job-1", 8)])
async def test_a_store_that_stays_away_is_no_fault_of_the_model_and_stays_unnamed(
    job_id: str, num_failures: int
) -> None:
    request = stored(job_id)
    with pytest.raises(RequestFailed) as failed:
        await Delivery(Coder(), Store(num_failures)).deliver(decoded(request))
    error = from_failure(failure_of(request.request_id, failed.value))
    assert (error.status, error.code) == (503, "result_store_unavailable")
    assert error.retry == "self"
    assert PATH not in error.message
