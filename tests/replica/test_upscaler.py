"""An upscaler's worker beside a real dispatch service: leases on finished images become larger."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.cell.worker import Worker
from ray_cluster.errors import RequestFailed
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Finished, Poll, Registration
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.replica.results import Results
from ray_cluster.replica.upscale.skill import UpscaleSkill
from ray_cluster.requests import Failure, ImageRequest, ImageResult, Timing, UpscaleUse
from ray_cluster.storage.blob_store import BlobStore
from tests.fakes import image_request, registration
from tests.replica.setup import Link, new_service, until


class Coder:
    """Doubles the bytes of an image; what is damaged it does not take.

    Attributes:
        pending: results that are not there yet, while it hangs.
    """

    def __init__(self) -> None:
        self.pending: list[Future[bytes]] = []
        self.hangs = False

    def enlarge(self, png: bytes, factor: int, *_about: Any) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self.hangs:
            self.pending.append(future)
        elif png == b"damaged":
            future.set_exception(RequestFailed("no png", "coding"))
        else:
            future.set_result(png * factor)
        return future


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(str(tmp_path))


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    link = Link(new_service())
    yield link
    await link.service.close()


@asynccontextmanager
async def upscaling(link: Link, store: BlobStore, coder: Any, name: str) -> AsyncIterator[Worker]:
    cost = StepCost(0.01, 0.0)
    about = Registration(name, None, 8, 4, cost, pool="big", kind="upscale", served_as="big")
    worker = Worker(UpscaleSkill(about, coder, Results(store), link=link, clock=time.monotonic))
    worker.start()
    await until(lambda: link.service._core.replicas.ids("upscale:big"))
    try:
        yield worker
    finally:
        await worker.drain()


async def made_by_its_model(link: Link, store: BlobStore, data: bytes | None) -> ImageRequest:
    """Have a request accepted and its image made; None if the store has lost that."""
    request = image_request("a", upscale=UpscaleUse("big", 2))
    await link.service.register(registration())
    assert (await link.service.offer([request])).accepted
    (lease,) = (await link.service.poll(Poll("r", 1, 1), 1.0)).leases
    if data is not None:
        store.put("a.candidate", data)
    result = ImageResult("a", b"", "png", Timing(denoise_s=1.0), 5)
    await link.service.report("r", [Finished("a", lease.fence, result)])
    return request


async def end_of(link: Link) -> Outcome:
    return (await link.service.wait(["a"], 30.0))["a"]


async def test_a_finished_image_is_enlarged(link: Link, store: BlobStore) -> None:
    async with upscaling(link, store, Coder(), "u"):
        await made_by_its_model(link, store, b"image")
        outcome = await end_of(link)
    assert isinstance(outcome, Completed)
    assert outcome.result.data == b"imageimage"
    assert outcome.result.timing.denoise_s == 1.0


@pytest.mark.parametrize(
    ("data", "stage", "words"),
    [(None, "storing", "the image that was made is gone"), (b"damaged", "upscale", "no png")],
)
async def test_an_image_that_cannot_be_read_fails_in_words(
    link: Link, store: BlobStore, data: bytes | None, stage: str, words: str
) -> None:
    async with upscaling(link, store, Coder(), "u"):
        await made_by_its_model(link, store, data)
        outcome = await end_of(link)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage, outcome.message) == ("error", stage, words)


async def test_a_worker_that_stops_returns_what_it_has_and_is_no_lost_one(
    link: Link, store: BlobStore
) -> None:
    coder = Coder()
    coder.hangs = True
    async with upscaling(link, store, coder, "u") as first:
        await made_by_its_model(link, store, b"image")
        await until(lambda: coder.pending)
        await first.drain()
        record = link.service._core._ledger.get("a")
        assert record is not None
        assert (record.holder, record.num_losses) == (None, 0)
        coder.hangs = False
        async with upscaling(link, store, coder, "v"):
            outcome = await end_of(link)
    assert isinstance(outcome, Completed)
    assert outcome.result.data == b"imageimage"
