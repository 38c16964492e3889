"""Processes that load models take turns, and none waits for ever."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ray_cluster.process.load_turns import LoadTurns


def test_as_many_load_at_once_as_there_are_turns(tmp_path: Path) -> None:
    turns, running, most = LoadTurns(tmp_path / "new", 2), 0, 0

    async def load(kind: str) -> None:
        nonlocal running, most
        async with turns.turn(kind):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1

    async def all_load() -> None:
        await asyncio.gather(*(load(kind) for kind in "abcdef"))

    asyncio.run(all_load())
    assert most == 2


def test_the_first_of_another_kind_comes_before_the_second_of_one(tmp_path: Path) -> None:
    turns, order = LoadTurns(tmp_path, 1), []

    async def load(name: str) -> None:
        async with turns.turn(name[0]):
            order.append(name)
            await asyncio.sleep(0.05)

    async def all_load() -> None:
        await asyncio.gather(*(load(name) for name in ("a1", "a2", "b1")))

    asyncio.run(all_load())
    assert order == ["a1", "b1", "a2"]


def test_who_hangs_delays_others_no_longer_than_their_patience(tmp_path: Path) -> None:
    async def load() -> None:
        async with LoadTurns(tmp_path, 1).turn("a"), LoadTurns(tmp_path, 1, 0.2).turn("b"):
            pass

    asyncio.run(asyncio.wait_for(load(), 5.0))


@pytest.mark.parametrize(("num_cores", "num_at_once"), [(1, 1), (2, 1), (16, 8)])
def test_more_load_at_once_with_more_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_at_once: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)))
    assert LoadTurns.of_this_machine(tmp_path)._num_at_once == num_at_once
