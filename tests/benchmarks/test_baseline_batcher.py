"""Requests that can share a call do, and one that is late, broken or gone costs no other."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.baselines.batcher import Batcher, Dropped

Item = tuple[str, int]


class Work:
    """Notes every group; goes on when it is let."""

    def __init__(self) -> None:
        self.groups: list[list[Item]] = []
        self.may_go_on = threading.Event()

    def __call__(self, items: Sequence[Item]) -> list[int]:
        self.groups.append(list(items))
        if not self.may_go_on.wait(10):
            raise TimeoutError
        if any(key == "broken" for key, _ in items):
            raise ArithmeticError("broken")
        return [10 * number for _, number in items]


@asynccontextmanager
async def batcher(
    work: Work,
    *,
    max_batch: int = 4,
    wait_s: float = 0.0,
    is_hopeless: Callable[[Item, float], bool] = lambda _item, _now: False,
) -> AsyncIterator[Batcher[Item, int]]:
    one: Batcher[Item, int] = Batcher(
        work,
        key_of=lambda item: item[0],
        max_batch=max_batch,
        wait_s=wait_s,
        is_hopeless=is_hopeless,
        now=lambda: 100.0,
    )
    try:
        yield one
    finally:
        work.may_go_on.set()
        await one.close()


async def submit_while_busy(
    one: Batcher[Item, int], work: Work, items: Sequence[Item], *gone: Item
) -> list[object]:
    """Submit items while another one holds the thread, some of which go; then let it go on."""
    busy = asyncio.ensure_future(one.submit(("busy", 0)))
    for _ in range(500):
        if work.groups:
            break
        await asyncio.sleep(0.01)
    left = [asyncio.ensure_future(one.submit(item)) for item in gone]
    waiting = [asyncio.ensure_future(one.submit(item)) for item in items]
    await asyncio.sleep(0.05)
    for each in left:
        each.cancel()
    await asyncio.sleep(0.02)
    work.may_go_on.set()
    return (await asyncio.gather(busy, *waiting, return_exceptions=True))[1:]


async def test_what_is_alike_shares_a_call_and_who_waits_longest_goes_first() -> None:
    work = Work()
    items = [("a", 1), ("b", 2), ("a", 3), ("a", 4), ("b", 5)]
    async with batcher(work) as one:
        assert await submit_while_busy(one, work, items, ("a", 9)) == [10, 20, 30, 40, 50]
    assert work.groups[1:] == [[("a", 1), ("a", 3), ("a", 4)], [("b", 2), ("b", 5)]]


@pytest.mark.parametrize(("max_batch", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (8, [5])])
async def test_a_call_takes_no_more_than_it_may(max_batch: int, sizes: list[int]) -> None:
    work = Work()
    async with batcher(work, max_batch=max_batch) as one:
        await submit_while_busy(one, work, [("a", number) for number in range(5)])
    assert [len(group) for group in work.groups[1:]] == sizes


async def test_an_idle_thread_waits_for_more_only_while_its_call_is_not_full() -> None:
    work = Work()
    work.may_go_on.set()
    # an hour would never end here
    async with batcher(work, max_batch=2, wait_s=3600.0) as one, asyncio.timeout(60):
        await asyncio.gather(one.submit(("a", 1)), one.submit(("a", 2)))
    async with batcher(work, max_batch=2, wait_s=0.2) as one, asyncio.timeout(60):
        started_s = time.monotonic()
        await one.submit(("a", 3))
        assert time.monotonic() - started_s >= 0.2
    assert work.groups == [[("a", 1), ("a", 2)], [("a", 3)]]


async def test_what_is_late_is_dropped_before_work_and_an_error_is_that_of_its_own_call() -> None:
    work = Work()

    def is_hopeless(item: Item, now_s: float) -> bool:
        assert now_s == 100.0
        return item[1] == 2

    async with batcher(work, is_hopeless=is_hopeless) as one:
        items = [("a", 1), ("a", 2), ("a", 3), ("broken", 4)]
        first, second, third, fourth = await submit_while_busy(one, work, items)
    assert (first, third) == (10, 30)
    assert isinstance(second, Dropped)
    assert isinstance(fourth, ArithmeticError)
    assert work.groups[1:] == [[("a", 1), ("a", 3)], [("broken", 4)]]
