"""A cancelled image is gone within a step, wherever it was, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.imaging.processes.image_coder import ImageCoder
from tests.engine.staged import StagedModel
from tests.replica.cancelling import (
    SEED,
    CancelCell,
    Figures,
    Held,
    Way,
    memory_mib,
)
from tests.replica.setup import BY_ID, until
from tests.replica.test_states import kill

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(900)

LEAN, FULL = 2, 50
FEW, MANY = 4, 60
WAYS: tuple[Way, ...] = ("delete", "gone")

Begin = Callable[[], CancelCell]


@pytest.fixture(params=[LEAN, pytest.param(FULL, marks=pytest.mark.slow)])
def count(request: pytest.FixtureRequest) -> int:
    """Cancels of each stage and way."""
    return int(request.param)


@pytest.fixture
def begin(
    tmp_path: Path,
    model: StagedModel,
    coder: ImageCoder,
    pixels: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Begin:
    monkeypatch.setattr("ray_cluster.jobs.sweeper.LATE_WRITE_S", 0.2)
    assert all(one.seed != SEED for one in BY_ID.values())
    return lambda: CancelCell(tmp_path, model, coder, pixels)


def report(what: str, cell: CancelCell, figures: Figures, before_mib: float) -> None:
    logger.warning(
        "%s: %d cancels; steps of the row begun after the call: worst %d, mean %.2f; after the "
        "answer: worst %d; %d images of others made; memory %.0f MiB before, %.0f MiB after",
        *(what, len(figures.after_call), max(figures.after_call)),
        *(sum(figures.after_call) / len(figures.after_call), max(figures.after_answer)),
        *(cell.num_made, before_mib, memory_mib()),
    )


async def test_one_that_waits(begin: Begin, count: int) -> None:
    async with begin().running() as cell:
        # it is known what the model is, and nobody takes anything
        first = await cell.add_replica("first")
        cell.workers.remove(first)
        await first.drain()
        before_mib, ids = memory_mib(), []
        for way in WAYS:
            for _ in range(count):
                one = await cell.begin(way, FEW)
                ids.append(one.request_id)
                await one.cancel()
                assert not cell.holds(one.request_id)
        await cell.nothing_is_left()
        worker = await cell.add_replica("second")
        async with cell.company():
            await until(lambda: cell.num_made >= 3)
        await cell.nothing_is_left()
        worker.check_alive()
        assert not {one for step in cell.steps() for one in step} & set(ids)
        assert len(ids) == 2 * count
        logger.warning(
            "waiting: %d cancels; no step; memory %.0f MiB before, %.0f MiB after",
            *(len(ids), before_mib, memory_mib()),
        )


@pytest.mark.parametrize("stage", ["encode", "decode", "coding"])
async def test_one_that_is_held_in_a_stage(begin: Begin, count: int, stage: Held) -> None:
    """The stage's work is under way and its result is of no more use."""
    figures = Figures()
    async with begin().running() as cell:
        await cell.add_replica("one")
        before_mib = memory_mib()
        async with cell.company():
            for index in range(2 * count):
                cell.door.stop_at(stage)
                one = await cell.begin(WAYS[index % 2], FEW)
                await asyncio.to_thread(cell.door.arrived.wait)
                called = len(cell.steps())
                await one.cancel()
                answered = len(cell.steps())
                cell.door.open()
                await cell.is_gone(one)
                cell.take_figures(one.request_id, called, answered, figures)
        await cell.nothing_is_left()
        report(stage, cell, figures, before_mib)
    assert max(figures.after_call) == 0


async def test_one_between_its_steps(begin: Begin, count: int) -> None:
    """At a random moment, with others in its batch that go on."""
    figures, chance = Figures(), random.Random(4)
    async with begin().running() as cell:
        await cell.add_replica("one")
        before_mib = memory_mib()
        async with cell.company():
            for index in range(2 * count):
                one = await cell.begin(WAYS[index % 2], MANY)
                await cell.first_step(one)
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                called = len(cell.steps())
                await one.cancel()
                answered = len(cell.steps())
                await cell.more_steps(3)
                assert not cell.holds(one.request_id)
                cell.take_figures(one.request_id, called, answered, figures)
        await cell.nothing_is_left()
        report("denoise", cell, figures, before_mib)
    assert max(figures.after_answer) <= 1


async def test_one_on_a_dying_replica(begin: Begin, count: int) -> None:
    """Cancelled after the death, and before it is known; nobody goes on with it."""
    figures, chance = Figures(), random.Random(6)
    async with begin().running() as cell:
        await cell.add_replica("one")
        await cell.add_replica("two")
        before_mib = memory_mib()
        async with cell.company():
            for index in range(2 * count):
                one = await cell.begin(WAYS[index % 2], MANY)
                await cell.first_step(one)
                (dying,) = (a for a in cell.workers if one.request_id in a.skill.leases)
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                await kill(dying)
                cell.workers.remove(dying)
                called = len(cell.steps())
                await one.cancel()
                answered = len(cell.steps())
                await cell.link.service.unregister(dying.skill.registration.replica_id)
                await cell.add_replica(f"life-{index}")
                assert not cell.holds(one.request_id)
                cell.take_figures(one.request_id, called, answered, figures)
                # its memory went with it
                del dying
        await cell.nothing_is_left()
        report("dying replica", cell, figures, before_mib)
    assert max(figures.after_call) == 0
