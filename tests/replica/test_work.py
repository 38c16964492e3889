"""A replica's work, as the dispatcher sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ray_cluster.errors import RequestFailed
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.requests import Failure
from tests.engine.harness import request
from tests.engine.staged import StagedModel
from tests.replica.setup import (
    BY_ID,
    REQUESTS,
    check_image,
    offer,
    outcomes,
    serving,
    until,
)

# --- work ---


async def test_many_requests_on_two_replicas_are_each_completed_once(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    async with serving(model, coder, "one", "two") as (link, workers):
        await until(lambda: len(link.epochs) == 2)
        await offer(link.service, REQUESTS)
        for outcome in (await outcomes(link.service, REQUESTS)).values():
            check_image(outcome, pixels)
            assert isinstance(outcome, Completed)
            assert outcome.attempts == 1
        for worker in workers:
            worker.check_alive()
        snapshot = await link.service.snapshot()
        assert snapshot.totals["completed"] == len(REQUESTS)
        assert (snapshot.num_waiting, snapshot.num_leased) == (0, 0)
        assert len(link.reported) == len(REQUESTS)


async def test_an_aborted_request_leaves_the_replica_and_its_peers_go_on(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    gate = model.gate("denoise", "r1", call=1)
    async with serving(model, coder, "one") as (link, _workers):
        await offer(link.service, REQUESTS[:4])
        await asyncio.to_thread(gate.await_reached)
        await link.service.abort(["r1"])
        (ended,) = (await outcomes(link.service, [BY_ID["r1"]])).values()
        assert isinstance(ended, Failure)
        assert ended.kind == "aborted"
        # the poll brings the word while the step is still held up
        await asyncio.sleep(0.3)
        num_calls = len(model.calls)
        gate.open()
        others = [one for one in REQUESTS[:4] if one.request_id != "r1"]
        for outcome in (await outcomes(link.service, others)).values():
            check_image(outcome, pixels)
        assert all("r1" not in ids for _, ids in model.calls[num_calls:])
        assert "r1" not in {event.request_id for event in link.reported}


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
async def test_a_failing_request_is_reported_with_its_stage_and_the_replica_goes_on(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, stage: Any
) -> None:
    def hook(at: str, ids: Sequence[str]) -> None:
        if at == stage and "r2" in ids:
            raise RuntimeError("out of luck")

    model.before.append(hook)
    async with serving(model, coder, "one") as (link, workers):
        await offer(link.service, REQUESTS[:4])
        found = await outcomes(link.service, REQUESTS[:4])
        failure = found.pop("r2")
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.stage) == ("error", stage)
        assert "out of luck" in failure.message
        for outcome in found.values():
            check_image(outcome, pixels)
        workers[0].check_alive()


async def test_a_prompt_that_is_too_long_comes_back_as_invalid(
    model: StagedModel, coder: ImageCoder
) -> None:
    async with serving(model, coder, "one") as (link, _workers):
        long = request("long", prompt="red " * 40)
        await offer(link.service, [long])
        failure = (await outcomes(link.service, [long]))["long"]
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.param) == ("invalid", "prompt")


class BrokenCoder:
    """Fails for one request, in one way or the other."""

    def __init__(self, inner: ImageCoder, error: Exception, *, at_once: bool) -> None:
        self._inner, self._error, self._at_once = inner, error, at_once

    def submit(self, pixels: Any, spec: Any, recipe: Any, *more: Any) -> Any:
        coding = self._inner.submit(pixels, spec, recipe, *more)
        if recipe["seed"] == "2":
            if self._at_once:
                raise self._error
            coding = self._inner._writers._threads.submit(self._raise)  # type: ignore[arg-type]
        return coding

    def _raise(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "at_once"),
    [
        (RequestFailed("the process that codes it ended", "coding"), False),
        (OSError(24, "too many open files"), False),
        (RuntimeError("cannot schedule new futures after shutdown"), True),
    ],
)
async def test_an_image_that_cannot_be_coded_fails_alone(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, error: Exception, at_once: bool
) -> None:
    broken = BrokenCoder(coder, error, at_once=at_once)
    async with serving(model, broken, "one") as (link, workers):
        await offer(link.service, REQUESTS[:4])
        found = await outcomes(link.service, REQUESTS[:4])
        failure = found.pop("r2")
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.stage) == ("error", "coding")
        for outcome in found.values():
            check_image(outcome, pixels)
        workers[0].check_alive()
