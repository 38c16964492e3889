"""A replica agent with a real engine and a real image coder against the real dispatcher."""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_cluster.config import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.engine.building import build_runner
from ray_cluster.engine.loading import load_model
from ray_cluster.engine.warmup import prepare_threads
from ray_cluster.errors import DispatcherUnavailable, RequestFailed
from ray_cluster.image_coding import ImageCoder
from ray_cluster.leases import Completed, Outcome, Poll, Registration, Returned
from ray_cluster.policies.types import StepCost
from ray_cluster.replica import ReplicaAgent
from ray_cluster.requests import SAMPLER_NAMES, Failure, ImageRequest
from tests.engine.harness import pool, request
from tests.engine.random_models import save_sd
from tests.engine.staged import StagedModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

CONFIG = DispatchConfig(
    poll_s=0.3,
    replica_timeout_s=60.0,
    attached_timeout_s=120.0,
    default_slo_s=600.0,
    max_attempts=50,
)
PATIENCE_S = 120.0
REQUESTS = [
    request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i, num_steps=3 + i % 5) for i in range(12)
]
BY_ID = {one.request_id: one for one in REQUESTS}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> StagedModel:
    prepare_threads(1)
    folder = save_sd(tmp_path_factory.mktemp("replica") / "sd")
    return StagedModel(load_model(pool(folder)), REQUESTS)


@pytest.fixture(scope="module")
def pixels(staged: StagedModel) -> dict[str, Any]:
    return dict(staged.pixels())


@pytest.fixture(scope="module")
def coder() -> Iterator[ImageCoder]:
    with ImageCoder() as coder:
        yield coder


@pytest.fixture
def model(staged: StagedModel) -> Iterator[StagedModel]:
    staged.calls.clear()
    staged.before.clear()
    yield staged
    staged.before.clear()


def new_service(epoch: int = 1) -> DispatchService:
    core = DispatchCore(config=CONFIG, limits=LimitsConfig(), epoch=epoch)
    return DispatchService(core, config=CONFIG, clock=time.monotonic)


class Link:
    """The way to a dispatcher, which may fail before a call is delivered, or after.

    Attributes:
        service: whom the calls reach; may be exchanged, as by a restart.
        fails: asked with the call's name and the side; true loses the call, or its answer.
    """

    def __init__(self, service: DispatchService) -> None:
        self.service = service
        self.fails: Callable[[str, str], bool] = lambda _name, _side: False
        self.num_lost = 0
        self.reported: list[Any] = []
        self.epochs: list[int] = []

    async def register(self, registration: Registration) -> int:
        epoch: int = await self._call("register", registration)
        self.epochs.append(epoch)
        return epoch

    async def unregister(self, replica_id: str) -> None:
        await self._call("unregister", replica_id)

    async def poll(self, poll: Any) -> Any:
        return await self._call("poll", poll)

    async def report(self, replica_id: str, events: Sequence[Any]) -> Any:
        self.reported += events
        return await self._call("report", replica_id, events)

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._maybe_fail(name, "before")
        answer = await getattr(self.service, name)(*arguments)
        self._maybe_fail(name, "after")
        return answer

    def _maybe_fail(self, name: str, side: str) -> None:
        if self.fails(name, side):
            self.num_lost += 1
            raise DispatcherUnavailable(f"{name} lost {side} it was delivered")


def new_agent(
    model: StagedModel, link: Link, coder: Any, replica_id: str = "one", max_in_flight: int = 6
) -> ReplicaAgent:
    profile = model.inner.profile
    return ReplicaAgent(
        Registration(replica_id, profile, max_in_flight, 4, StepCost(0.01, 0.1)),
        make_runner=partial(
            build_runner, model.loaded, pool("unused", max_batch=4), clock=time.monotonic
        ),
        coder=coder,
        link=link,
        clock=time.monotonic,
    )


@asynccontextmanager
async def serving(
    model: StagedModel, coder: Any, *replica_ids: str, link: Link | None = None
) -> AsyncIterator[tuple[Link, list[ReplicaAgent]]]:
    link = link or Link(new_service())
    agents = [new_agent(model, link, coder, name) for name in replica_ids]
    for agent in agents:
        agent.start()
    try:
        yield link, agents
    finally:
        link.fails = lambda _name, _side: False
        for agent in agents:
            await agent.drain()
        await link.service.close()


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


async def offer(service: DispatchService, requests: Sequence[ImageRequest]) -> None:
    """Offer the requests once a replica has registered."""
    end_s = time.monotonic() + PATIENCE_S
    while not await service.models():
        assert time.monotonic() < end_s, "no replica has registered"
        await asyncio.sleep(0.01)
    for one in requests:
        assert (await service.offer([one])).accepted


async def outcomes(
    service: DispatchService, requests: Sequence[ImageRequest]
) -> dict[str, Outcome]:
    """Wait for the end of all requests; each ends once."""
    found: dict[str, Outcome] = {}
    left = {one.request_id for one in requests}
    async with asyncio.timeout(PATIENCE_S):
        while left:
            new = await service.wait(left, 5.0)
            assert found.keys().isdisjoint(new)
            found |= new
            left -= new.keys()
    return found


def check_image(outcome: Outcome, pixels: dict[str, Any]) -> None:
    assert isinstance(outcome, Completed), outcome
    found = np.asarray(Image.open(io.BytesIO(outcome.result.data)))
    gap = np.abs(found.astype(int) - pixels[outcome.request_id].astype(int)).max()
    assert gap <= 1


# --- work ---


async def test_many_requests_on_two_replicas_are_each_completed_once(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    async with serving(model, coder, "one", "two") as (link, agents):
        await until(lambda: len(link.epochs) == 2)
        await offer(link.service, REQUESTS)
        for outcome in (await outcomes(link.service, REQUESTS)).values():
            check_image(outcome, pixels)
            assert isinstance(outcome, Completed)
            assert outcome.attempts == 1
        for agent in agents:
            agent.check_alive()
        snapshot = await link.service.snapshot()
        assert snapshot.totals["completed"] == len(REQUESTS)
        assert (snapshot.num_waiting, snapshot.num_leased) == (0, 0)
        assert len(link.reported) == len(REQUESTS)


async def test_an_aborted_request_leaves_the_replica_and_its_peers_go_on(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    gate = model.gate("denoise", "r1", call=1)
    async with serving(model, coder, "one") as (link, _agents):
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
    async with serving(model, coder, "one") as (link, agents):
        await offer(link.service, REQUESTS[:4])
        found = await outcomes(link.service, REQUESTS[:4])
        failure = found.pop("r2")
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.stage) == ("error", stage)
        assert "out of luck" in failure.message
        for outcome in found.values():
            check_image(outcome, pixels)
        agents[0].check_alive()


async def test_a_prompt_that_is_too_long_comes_back_as_invalid(
    model: StagedModel, coder: ImageCoder
) -> None:
    async with serving(model, coder, "one") as (link, _agents):
        long = request("long", prompt="red " * 40)
        await offer(link.service, [long])
        failure = (await outcomes(link.service, [long]))["long"]
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.param) == ("invalid", "prompt")


class BrokenCoder:
    """Fails for one request, in one way or the other."""

    def __init__(self, inner: ImageCoder, error: Exception, *, at_once: bool) -> None:
        self._inner, self._error, self._at_once = inner, error, at_once

    def submit(self, pixels: Any, spec: Any, recipe: Any) -> Any:
        coding = self._inner.submit(pixels, spec, recipe)
        if recipe["seed"] == "2":
            if self._at_once:
                raise self._error
            coding = self._inner._threads.submit(self._raise)  # type: ignore[arg-type]
        return coding

    def _raise(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "at_once"),
    [
        (RequestFailed("the image coder died twice", "coding"), False),
        (OSError(24, "too many open files"), False),
        (RuntimeError("cannot schedule new futures after shutdown"), True),
    ],
)
async def test_an_image_that_cannot_be_coded_fails_alone(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, error: Exception, at_once: bool
) -> None:
    broken = BrokenCoder(coder, error, at_once=at_once)
    async with serving(model, broken, "one") as (link, agents):
        await offer(link.service, REQUESTS[:4])
        found = await outcomes(link.service, REQUESTS[:4])
        failure = found.pop("r2")
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.stage) == ("error", "coding")
        for outcome in found.values():
            check_image(outcome, pixels)
        agents[0].check_alive()


# --- a link that fails ---


@pytest.mark.parametrize("seed", range(4))
async def test_a_link_that_fails_at_random_loses_and_doubles_nothing(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, seed: int
) -> None:
    chance = random.Random(seed)
    link = Link(new_service())
    link.fails = lambda _name, _side: chance.random() < 0.25
    async with serving(model, coder, "one", "two", link=link) as (link, agents):
        await offer(link.service, REQUESTS)
        for outcome in (await outcomes(link.service, REQUESTS)).values():
            check_image(outcome, pixels)
        for agent in agents:
            agent.check_alive()
        assert link.num_lost > 0, "the link should have failed"
        snapshot = await link.service.snapshot()
        assert snapshot.totals["completed"] == len(REQUESTS)
        assert not snapshot.totals.keys() & {"error", "lost", "aborted"}
        await until(lambda: all(not agent._ended for agent in agents))


@pytest.mark.parametrize("side", ["before", "after"])
async def test_a_result_that_cannot_be_reported_yet_is_not_worked_on_again(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, side: str
) -> None:
    """Reports are lost for several grace times while polls get through."""
    async with serving(model, coder, "one", "two") as (link, _agents):
        ends_s = time.monotonic() + 5 * 2 * CONFIG.poll_s
        link.fails = lambda name, at: name == "report" and at == side and time.monotonic() < ends_s
        await offer(link.service, REQUESTS[:6])
        found = await outcomes(link.service, REQUESTS[:6])
        assert link.num_lost > 0
        for outcome in found.values():
            check_image(outcome, pixels)
            assert isinstance(outcome, Completed)
            assert outcome.attempts == 1
        steps = [ids for stage, ids in model.calls if stage == "denoise"]
        assert sum(map(len, steps)) == sum(one.num_steps for one in REQUESTS[:6])


async def test_a_replica_waits_for_a_dispatcher_that_is_not_there_yet(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    link = Link(new_service())
    is_down = True
    link.fails = lambda _name, _side: is_down
    async with serving(model, coder, "one", link=link) as (link, agents):
        await until(lambda: link.num_lost >= 2)
        agents[0].check_alive()
        is_down = False
        await offer(link.service, REQUESTS[:2])
        for outcome in (await outcomes(link.service, REQUESTS[:2])).values():
            check_image(outcome, pixels)


async def test_a_restarted_dispatcher_makes_the_replica_drop_its_rows_and_register_again(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    gate = model.gate("denoise", "r0", call=2)
    async with serving(model, coder, "one") as (link, agents):
        await offer(link.service, REQUESTS[:3])
        await asyncio.to_thread(gate.await_reached)
        before = link.service
        link.service = new_service(epoch=2)
        await before.close()
        await until(lambda: link.epochs == [1, 2], "a new registration")
        assert not agents[0]._leases
        num_calls = len(model.calls)
        gate.open()
        # under an id of the earlier life, too: whatever was done for that is not mixed in
        again = [BY_ID["r0"], BY_ID["r5"]]
        await offer(link.service, again)
        for outcome in (await outcomes(link.service, again)).values():
            check_image(outcome, pixels)
        agents[0].check_alive()
        later = [ids for stage, ids in model.calls[num_calls:] if stage == "denoise"]
        assert sum("r0" in ids for ids in later) == BY_ID["r0"].num_steps
        assert all("r1" not in ids and "r2" not in ids for ids in later)


async def test_a_task_that_dies_of_something_unexpected_is_found(
    model: StagedModel, coder: ImageCoder
) -> None:
    async with serving(model, coder, "one") as (link, agents):
        await until(lambda: link.epochs)
        agents[0].check_alive()

        async def nonsense(_poll: Any) -> Any:
            raise KeyError("a bug")

        link.poll = nonsense  # type: ignore[method-assign]
        await until(lambda: any(task.done() for task in agents[0]._loops))
        with pytest.raises(RuntimeError, match="the polling task has died"):
            agents[0].check_alive()


# --- handing over ---


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
async def test_what_a_drained_replica_hands_back_another_one_finishes(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, stage: Any
) -> None:
    link = Link(new_service())
    one = new_agent(model, link, coder, "one")
    gate = model.gate(stage, "r4", call=3 if stage == "denoise" else 0)
    one.start()
    await offer(link.service, REQUESTS[:6])
    await asyncio.to_thread(gate.await_reached)
    draining = asyncio.create_task(one.drain())
    await asyncio.sleep(0.1)
    gate.open()
    await draining
    returned = [event for event in link.reported if isinstance(event, Returned)]
    assert returned
    state_by_id = {event.request_id: event for event in returned}
    done = {key: event.steps_done for key, event in state_by_id.items()}
    if stage == "denoise":
        assert done["r4"] >= 4
    if stage == "decode":
        assert done["r4"] == BY_ID["r4"].num_steps
    snapshot = await link.service.snapshot()
    assert snapshot.replicas == ()
    assert snapshot.num_leased == 0
    num_calls = len(model.calls)
    async with serving(model, coder, "two", link=link):
        found = await outcomes(link.service, REQUESTS[:6])
        for outcome in found.values():
            check_image(outcome, pixels)
        later = [ids for at, ids in model.calls[num_calls:] if at == "denoise"]
        # no step is taken twice; rows that came by way of bytes have no name here
        left = sum(BY_ID[key].num_steps - count for key, count in done.items())
        assert sum(map(len, later)) == left
        assert (await link.service.snapshot()).totals["completed"] == 6


async def test_replicas_that_come_and_go_leave_every_image_as_it_is(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    """Five replicas one after the other, each taken away at a random moment."""
    chance = random.Random(5)
    link = Link(new_service())
    model.before.append(lambda *_: time.sleep(0.01))
    first = new_agent(model, link, coder, "first")
    first.start()
    await offer(link.service, REQUESTS)
    agent = first
    for life in range(5):
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        await agent.drain()
        agent = new_agent(model, link, coder, f"life-{life}")
        agent.start()
    for outcome in (await outcomes(link.service, REQUESTS)).values():
        check_image(outcome, pixels)
    await agent.drain()
    assert (await link.service.snapshot()).totals["completed"] == len(REQUESTS)
    await link.service.close()


async def test_a_state_that_cannot_be_read_starts_the_request_over(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(new_service())
    await link.register(Registration("thief", model.inner.profile, 4, 4, StepCost(0.01, 0.1)))
    await offer(link.service, REQUESTS[:2])
    leases = (await link.poll(Poll("thief", 1, 4))).leases
    assert len(leases) == 2
    await link.report(
        "thief",
        [Returned(lease.request.request_id, lease.fence, b"spoilt", 2) for lease in leases],
    )
    await link.unregister("thief")
    async with serving(model, coder, "one", link=link):
        for outcome in (await outcomes(link.service, REQUESTS[:2])).values():
            check_image(outcome, pixels)
    assert caplog.text.count("starts over") == 2
