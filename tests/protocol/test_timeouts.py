"""A time out is of the other side's making, not of a pause of one's own process."""

from __future__ import annotations

import asyncio
import time

import pytest

from ray_cluster.protocol.calling.timeouts import within


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


async def hang(cancelled: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_an_answer_in_time_is_returned_and_an_error_raised() -> None:
    async def fail() -> None:
        raise ValueError("no such thing")

    assert await within(5.0, after(0.01)) == "answer"
    with pytest.raises(ValueError, match="no such thing"):
        await within(5.0, fail())


async def test_silence_is_a_time_out_and_cancels_the_work() -> None:
    cancelled = asyncio.Event()
    with pytest.raises(TimeoutError):
        await within(0.1, hang(cancelled))
    await asyncio.wait_for(cancelled.wait(), 60.0)


async def test_whoever_gives_up_cancels_the_work() -> None:
    cancelled = asyncio.Event()
    waiting = asyncio.create_task(within(60.0, hang(cancelled)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(cancelled.wait(), 60.0)


async def test_what_came_while_the_process_stood_still_is_read() -> None:
    loop = asyncio.get_running_loop()

    async def answer() -> str:
        received: asyncio.Future[str] = loop.create_future()
        # of another thread, as from a socket: read some turns of the loop after it came
        loop.run_in_executor(None, time.sleep, 0.2).add_done_callback(
            lambda _: loop.call_later(0.05, received.set_result, "answer")
        )
        return await received

    waiting = asyncio.create_task(within(0.3, answer()))
    await asyncio.sleep(0.01)
    stand_still(1.5)
    assert await waiting == "answer"
