"""Errors that nobody expected: each ends the request in whose work it was met, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from ray_cluster.engine.stages.events import Previewed
from ray_cluster.errors import DeviceBroken, InvalidRequest
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.leases import Fence, Lease
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.preview_sender import Previews
from ray_cluster.replica.states.writer import StateWriter
from ray_cluster.requests import Failure, SmallImage
from tests.engine.staged import StagedModel
from tests.engine.staged import until as until_so
from tests.fakes import image_request
from tests.replica import test_late_loras, test_preemption, test_scorer
from tests.replica.lora_stores import MemoryFolder, new_link, status, storing, use
from tests.replica.setup import (
    BY_ID,
    REQUESTS,
    Link,
    MemoryBlobs,
    check_image,
    new_service,
    new_worker,
    offer,
    outcomes,
    serving,
    until,
)
from tests.replica.test_state_writer import idle, state, wanted

SECRET = "password hunter2"
FOUR = REQUESTS[:4]


class Odd(Exception):
    """Of no kind that anybody has thought of."""


def odd(*_: object, **_options: object) -> Any:
    raise Odd(f"{SECRET}, {BY_ID['r2'].prompt}")


class OddAt:
    """Calls something real, but for one request."""

    def __init__(self, real: Callable[..., Any], error: BaseException, is_it: Any) -> None:
        self._real, self._error, self._is_it = real, error, is_it

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._is_it(args[0]):
            raise self._error
        return self._real(*args, **options)


def check_failure(outcome: Any, stage: str, kind: str = "Odd") -> None:
    assert isinstance(outcome, Failure), outcome
    assert (outcome.kind, outcome.stage) == ("error", stage)
    assert f"unexpected {kind}" in outcome.message
    assert SECRET not in outcome.message


async def check_it_fails_alone(
    link: Link, worker: Any, pixels: dict[str, Any], stage: str, kind: str = "Odd"
) -> None:
    """Check that r2 alone fails, and that the replica goes on and has a slot for each other."""
    found = await outcomes(link.service, FOUR)
    check_failure(found.pop("r2"), stage, kind)
    for outcome in found.values():
        check_image(outcome, pixels)
    await offer(link.service, [REQUESTS[4]])
    check_image((await outcomes(link.service, [REQUESTS[4]]))["r4"], pixels)
    worker.check_alive()
    await until(lambda: not len(worker.skill.leases) and not worker.skill._runner.num_in_flight)
    assert not worker.skill._beginnings.ids


async def test_one_that_the_runner_does_not_take_fails_alone(
    model: StagedModel,
    pixels: dict[str, Any],
    coder: ImageCoder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the direct path it would have ended the polling task."""
    async with serving(model, coder, "one") as (link, (worker,)):
        real = worker.skill._runner.submit
        worker.skill._runner.submit = OddAt(  # type: ignore[method-assign]
            real, Odd(f"{SECRET}: {BY_ID['r2'].prompt}"), lambda one: one.request_id == "r2"
        )
        await offer(link.service, FOUR)
        await check_it_fails_alone(link, worker, pixels, "replica")
    (record,) = [one for one in caplog.records if "unexpectedly" in one.getMessage()]
    assert record.levelno == logging.ERROR
    text = logging.Formatter().format(record)
    # where it was, and what it said; no prompt is ever written
    assert "in __call__" in text
    assert "Odd" in text
    assert f"{SECRET}: [prompt]" in text


@pytest.mark.parametrize("error", [Odd(SECRET), KeyError(SECRET), asyncio.CancelledError(SECRET)])
async def test_one_whose_needs_cannot_be_fetched_fails_alone(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, error: BaseException
) -> None:
    """Its task would have died and held its lease for ever, also if what it awaits is cancelled."""
    async with serving(model, coder, "one") as (link, (worker,)):
        beginnings: Any = worker.skill._beginnings
        beginnings._is_needed = lambda _lease: True
        beginnings._gather = OddAt(
            beginnings._gather, error, lambda lease: lease.request.request_id == "r2"
        )
        await offer(link.service, FOUR)
        await check_it_fails_alone(link, worker, pixels, "replica", type(error).__name__)


async def test_a_state_that_cannot_be_loaded_costs_its_steps_alone(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    blobs = MemoryBlobs()
    blobs.before = lambda call, _name: odd() if call == "get" else None
    async with serving(model, coder, "one", blobs=blobs) as (link, (worker,)):
        assert await worker.skill._states.load(FOUR[0], worker.skill._runner.device) is None
        await offer(link.service, FOUR[:1])
        check_image((await outcomes(link.service, FOUR[:1]))["r0"], pixels)


class OddCoder:
    """Codes all images but one."""

    def __init__(self, inner: ImageCoder, result: Callable[[], Future[bytes]]) -> None:
        self._inner, self._result = inner, result

    def submit(self, pixels: Any, spec: Any, recipe: Any, *more: Any) -> Any:
        coding = self._inner.submit(pixels, spec, recipe, *more)
        return self._result() if recipe["seed"] == "2" else coding


def cancelled() -> Future[bytes]:
    future: Future[bytes] = Future()
    future.cancel()
    return future


@pytest.mark.parametrize(("result", "kind"), [(odd, "Odd"), (cancelled, "CancelledError")])
async def test_an_image_that_cannot_be_coded_fails_alone(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, result: Any, kind: str
) -> None:
    async with serving(model, OddCoder(coder, result), "one") as (link, (worker,)):
        await offer(link.service, FOUR)
        await check_it_fails_alone(link, worker, pixels, "coding", kind)


async def test_one_that_the_coder_finds_invalid_ends_as_that(
    model: StagedModel, coder: ImageCoder
) -> None:
    def invalid() -> Future[bytes]:
        raise InvalidRequest("too wide for webp", "output_format")

    async with serving(model, OddCoder(coder, invalid), "one") as (link, _workers):
        await offer(link.service, [BY_ID["r2"]])
        failure = (await outcomes(link.service, [BY_ID["r2"]]))["r2"]
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.message) == ("invalid", "too wide for webp")


async def test_a_preview_that_cannot_be_made_frees_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Coder:
        submit = staticmethod(odd)

    previews = Previews(Link(new_service()), "r", Delivery(Coder()), lambda _id: None)  # type: ignore[arg-type]
    request = image_request()
    for steps_done in (1, 999):
        previews.send(Previewed(request, np.zeros((8, 8, 3), np.uint8), steps_done))
    await until(lambda: not len(previews._tasks))
    assert sum("no preview" in one.getMessage() for one in caplog.records) == 2


async def test_one_that_cannot_be_preempted_begins_anew(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had left the engine, and its lease was held for ever."""
    exchanging = test_preemption.exchanging
    async with exchanging(model, coder, MemoryBlobs(), "denoise", 1) as (link, worker, gate):
        monkeypatch.setattr(worker.skill._states, "keep_all", odd)
        gate.open()
        both = [test_preemption.LONG, test_preemption.SHORT]
        for outcome in (await outcomes(link.service, both)).values():
            check_image(outcome, pixels)
        (back,) = test_preemption.returned(link)
        assert back.steps_done == 0
        worker.check_alive()
        monkeypatch.undo()


async def test_loras_that_come_late_and_fail_oddly_end_the_request_alone(
    model: StagedModel, coder: ImageCoder
) -> None:
    """It would have waited for them in the engine for ever, in a slot of it."""
    shelf, one = test_late_loras.Shelf(model), test_late_loras.late("one")
    async with test_late_loras.serving(model, coder, shelf) as (link, worker):
        await offer(link.service, [one])
        await until(lambda: shelf.asked)
        shelf.error = Odd(SECRET)  # type: ignore[assignment]
        shelf.gate.set()
        check_failure((await outcomes(link.service, [one]))["one"], "lora")
        await until(lambda: not worker.skill._runner.num_in_flight)
        worker.check_alive()


@pytest.mark.parametrize("fails_at", ["store", "question"])
def test_the_writer_of_states_outlives_every_error(fails_at: str) -> None:
    blobs = MemoryBlobs()
    writer = StateWriter(blobs)
    writer.start()
    if fails_at == "store":
        blobs.before = odd
    writer.keep(state("a"), odd if fails_at == "question" else wanted)
    until_so(idle(writer, "a"))
    writer.forget("a", is_ended=True)
    assert writer.keep_all([state("b")], odd, timeout_s=60.0) == {}
    blobs.before = lambda _call, _name: None
    assert writer.keep_all([state("c", 3)], lambda _id: True, timeout_s=60.0) == {"c": 3}
    writer.stop()


class OddScorer(test_scorer.Brightness):
    """Fails over one image, each time in another way."""

    def __init__(self, fail: Callable[[list[float]], list[float]]) -> None:
        super().__init__()
        self._fail = fail

    def score(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        scores = super().score(prompts, images)
        return self._fail(scores) if "odd" in prompts else scores


@pytest.mark.parametrize("fail", [odd, lambda scores: [*scores, 0.5], lambda _scores: []])
async def test_an_image_that_is_scored_oddly_has_no_confidence_and_the_others_have(
    fail: Any,
) -> None:
    """The scoring task would have died, and with it the replica and all its leases."""
    link, scorer = Link(new_service()), OddScorer(fail)
    requests = [test_scorer.routed(n, "odd" if n == 1 else "a red circle") for n in range(4)]
    async with test_scorer.judging(scorer, link) as worker:
        await until(lambda: link.epochs)
        scorer.gate.clear()
        await test_scorer.light_images(link, requests)
        await until(lambda: scorer.batches)
        scorer.gate.set()
        found = await test_scorer.ends(link, requests)
        worker.check_alive()
    for request in requests:
        answer = found[request.request_id].cascade
        assert answer is not None
        assert (answer.confidence is None) == (request.prompt == "odd")


async def test_a_score_without_an_image_fails_alone() -> None:
    link, ended = Link(new_service()), list[Any]()
    async with test_scorer.judging(test_scorer.Brightness(), link) as worker:
        leases: Any = worker.skill.leases
        leases.end = lambda _request, event: ended.append(event)
        await worker.skill._score(
            [Lease(Fence(1, n), test_scorer.routed(n), 9.0, 0.0) for n in (0, 1)]
        )
        assert [one.failure.stage for one in ended] == ["score", "score"]


async def test_a_device_that_is_lost_still_ends_the_scoring() -> None:
    def lose(_scores: list[float]) -> list[float]:
        raise DeviceBroken("the device is lost")

    link = Link(new_service())
    async with test_scorer.judging(OddScorer(lose), link) as worker:
        await until(lambda: link.epochs)
        await test_scorer.light_images(link, [test_scorer.routed(0, "odd")])
        await until(worker._tasks[2].done)
        with pytest.raises(RuntimeError, match="the scoring task has died"):
            worker.check_alive()


async def test_a_lora_whose_fetch_fails_oddly_fails_alone() -> None:
    """The health check would have ended the store, and the fetches of all others with it."""
    link, folder = new_link("pastel", "outline"), MemoryFolder()
    async with storing(folder, link) as worker:
        folder.mistake = Odd(SECRET)
        await use(link, "pastel")
        await until(lambda: status(link, "pastel").state == "failed")
        assert "unexpected Odd" in status(link, "pastel").reason
        assert SECRET not in status(link, "pastel").reason
        folder.mistake = None
        await use(link, "outline")
        await until(lambda: status(link, "outline").state == "ready")
        worker.check_alive()


async def test_a_replica_that_leaves_cancels_what_it_fetches(
    model: StagedModel, coder: ImageCoder
) -> None:
    """A real cancellation is none of these errors: nothing is reported as failed."""
    link = Link(new_service())
    worker: Any = new_worker(model, link, coder)
    beginnings = worker.skill._beginnings
    begun = asyncio.Event()

    async def wait(*_: object, **_options: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    beginnings._is_needed, beginnings._gather = lambda _lease: True, wait
    worker.start()
    await offer(link.service, FOUR[:1])
    await begun.wait()
    await worker.drain()
    assert not any(isinstance(one, Completed) or hasattr(one, "failure") for one in link.reported)
    await link.service.close()
