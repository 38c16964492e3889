"""A replica whose link to the dispatcher fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from ray_cluster.cell.worker import Worker
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.replica.lora_store.skill import store_registration
from ray_cluster.replica.skill import Shell, Skill
from tests.engine.staged import StagedModel
from tests.replica.setup import (
    BY_ID,
    CONFIG,
    REQUESTS,
    Link,
    check_image,
    new_service,
    offer,
    outcomes,
    serving,
    until,
)

# --- a link that fails ---


@pytest.mark.parametrize("seed", range(4))
async def test_a_link_that_fails_at_random_loses_and_doubles_nothing(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, seed: int
) -> None:
    chance = random.Random(seed)
    link = Link(new_service())
    link.fails = lambda _name, _side: chance.random() < 0.25
    async with serving(model, coder, "one", "two", link=link) as (link, workers):
        await offer(link.service, REQUESTS)
        for outcome in (await outcomes(link.service, REQUESTS)).values():
            check_image(outcome, pixels)
        for worker in workers:
            worker.check_alive()
        assert link.num_lost > 0, "the link should have failed"
        snapshot = await link.service.snapshot()
        assert snapshot.totals["completed"] == len(REQUESTS)
        assert not snapshot.totals.keys() & {"error", "lost", "aborted"}
        await until(lambda: all(not worker.skill.leases.num_unacknowledged for worker in workers))


@pytest.mark.parametrize("side", ["before", "after"])
async def test_a_result_that_cannot_be_reported_yet_is_not_worked_on_again(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, side: str
) -> None:
    """Reports are lost for several grace times while polls get through."""
    async with serving(model, coder, "one", "two") as (link, _workers):
        reports_s: list[float] = []

        def fails(name: str, at: str) -> bool:
            if name != "report" or at != side:
                return False
            reports_s.append(time.monotonic())
            return reports_s[-1] < reports_s[0] + 2 * 2 * CONFIG.poll_s

        link.fails = fails
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
    async with serving(model, coder, "one", link=link) as (link, workers):
        await until(lambda: link.num_lost >= 2)
        workers[0].check_alive()
        is_down = False
        await offer(link.service, REQUESTS[:2])
        for outcome in (await outcomes(link.service, REQUESTS[:2])).values():
            check_image(outcome, pixels)


async def test_a_restarted_dispatcher_makes_the_replica_drop_its_rows_and_register_again(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    gate = model.gate("denoise", "r0", call=2)
    async with serving(model, coder, "one") as (link, workers):
        await offer(link.service, REQUESTS[:3])
        await asyncio.to_thread(gate.await_reached)
        before = link.service
        link.service = new_service(epoch=2)
        await before.close()
        await until(lambda: link.epochs == [1, 2], "a new registration")
        assert not workers[0].skill.leases
        num_calls = len(model.calls)
        gate.open()
        # under an id of the earlier life, too: whatever was done for that is not mixed in
        again = [BY_ID["r0"], BY_ID["r5"]]
        await offer(link.service, again)
        for outcome in (await outcomes(link.service, again)).values():
            check_image(outcome, pixels)
        workers[0].check_alive()
        later = [ids for stage, ids in model.calls[num_calls:] if stage == "denoise"]
        assert sum("r0" in ids for ids in later) == BY_ID["r0"].num_steps
        assert all("r1" not in ids and "r2" not in ids for ids in later)


async def test_a_task_that_dies_of_something_unexpected_is_found(
    model: StagedModel, coder: ImageCoder
) -> None:
    async with serving(model, coder, "one") as (link, workers):
        await until(lambda: link.epochs)
        workers[0].check_alive()

        async def nonsense(_poll: Any) -> Any:
            raise KeyError("a bug")

        poll, link.poll = link.poll, nonsense  # type: ignore[method-assign]
        await until(lambda: any(task.done() for task in workers[0]._tasks))
        link.poll = poll  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="the polling task has died"):
            workers[0].check_alive()


class Beginner(Skill):
    """Notes how many registrations there were whenever it is to begin anew."""

    def __init__(self, link: Link) -> None:
        super().__init__(store_registration("s", "n"), link)
        self.begun: list[int] = []
        self._epochs = link.epochs

    def start(self, shell: Shell) -> Sequence[asyncio.Task[None]]:
        return ()

    def on_registered(self) -> None:
        self.begun.append(len(self._epochs))


async def test_a_skill_hears_when_a_dispatcher_knows_nothing_of_it() -> None:
    link = Link(new_service())
    skill = Beginner(link)
    worker = Worker(skill)
    link.fails = lambda _name, _side: link.num_lost < 2
    worker.start()
    await until(lambda: skill.begun == [1])
    await link.service.unregister("s")
    await until(lambda: skill.begun == [1, 2])
    await worker.drain()
    await link.service.close()
