"""A replica whose accelerator is lost to its process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed
from tests.engine.staged import StagedModel
from tests.replica.setup import REQUESTS, check_image, offer, outcomes, serving, until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def breaks_once(stage: str, request_id: str) -> Callable[[str, Sequence[str]], None]:
    """Every device-side assertion is met by the replica that meets it first, and by no other."""
    is_done = False

    def hook(at: str, ids: Sequence[str]) -> None:
        nonlocal is_done
        if at == stage and request_id in ids and not is_done:
            is_done = True
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    return hook


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
async def test_its_leases_go_to_another_replica_and_it_reports_itself_unhealthy(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, stage: str
) -> None:
    model.before.append(breaks_once(stage, "r4"))
    async with serving(model, coder, "one", "two") as (link, workers):
        await until(lambda: len(link.epochs) == 2)
        await offer(link.service, REQUESTS)
        found = await outcomes(link.service, REQUESTS)
        for outcome in found.values():
            check_image(outcome, pixels)
        retried = found["r4"]
        assert isinstance(retried, Completed)
        assert retried.attempts == 2
        (broken,) = [worker for worker in workers if worker._death is not None]
        (well,) = [worker for worker in workers if worker is not broken]
        with pytest.raises(RuntimeError, match=f"the {stage} thread has died of DeviceBroken"):
            broken.check_alive()
        well.check_alive()
        assert broken._leaving is not None
        await broken._leaving
        snapshot = await link.service.snapshot()
        assert len(snapshot.replicas) == 1
        assert snapshot.totals["completed"] == len(REQUESTS)
        assert not snapshot.totals.keys() & {"error", "lost"}


async def test_an_image_that_was_finished_before_is_still_delivered(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    held = HeldCoder(coder)
    async with serving(model, held, "one") as (link, (worker,)):
        await offer(link.service, REQUESTS[:1])
        await until(lambda: held.codings, "the coder's work")
        model.before.append(breaks_once("encode", "r1"))
        await offer(link.service, REQUESTS[1:2])
        await until(lambda: worker._leaving is not None, "the end of the engine")
        held.let_go()
        found = await outcomes(link.service, REQUESTS[:1])
        check_image(found["r0"], pixels)
        assert worker._leaving is not None
        await worker._leaving
        assert (await link.service.snapshot()).num_leased == 0


class HeldCoder:
    """Codes nothing until it is let go."""

    def __init__(self, inner: ImageCoder) -> None:
        self._inner = inner
        self.codings: list[Any] = []

    def submit(self, *job: Any) -> Any:
        held: Future[bytes] = Future()
        self.codings.append((held, job))
        return held

    def let_go(self) -> None:
        for held, job in self.codings:
            held.set_result(self._inner.submit(*job).result(30))


async def test_draining_it_afterwards_does_nothing_more(
    model: StagedModel, coder: ImageCoder
) -> None:
    model.before.append(breaks_once("denoise", "r0"))
    async with serving(model, coder, "one") as (link, (worker,)):
        await offer(link.service, REQUESTS[:3])
        await until(lambda: worker._leaving is not None, "the end of the engine")
        async with asyncio.timeout(5):
            await worker.drain()
        snapshot = await link.service.snapshot()
        assert (snapshot.num_waiting, snapshot.num_leased, snapshot.replicas) == (3, 0, ())
        assert not link.reported
