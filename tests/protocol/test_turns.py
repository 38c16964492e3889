"""Work that many ask for is done once for all who ask at about the same time."""

from __future__ import annotations

import asyncio

from ray_cluster.process.turns import Shared
from tests.fakes import run_virtually


def test_whoever_asks_gets_a_run_that_begins_later_and_all_get_the_same() -> None:
    async def main() -> None:
        runs = 0

        async def work() -> int:
            nonlocal runs
            runs += 1
            mine = runs
            await asyncio.sleep(0.01)
            return mine

        shared, clock = Shared(work, 0.25), asyncio.get_running_loop().time
        assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
        first = asyncio.create_task(shared.get())
        assert await asyncio.gather(shared.get(), shared.get()) == [2, 2]
        assert (await first, runs) == (2, 2)
        assert clock() < 0.3

    run_virtually(main())


def test_a_run_that_hangs_has_no_other_beside_it() -> None:
    async def main() -> None:
        running, most, may_end = 0, 0, asyncio.Event()

        async def work() -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await may_end.wait()
            running -= 1
            return "done"

        shared, calls = Shared(work, 0.25), []
        for _ in range(20):
            calls.append(asyncio.create_task(shared.get()))
            await asyncio.sleep(0.3)
        # and those who leave end nothing for the others
        calls[0].cancel()
        may_end.set()
        assert set((await asyncio.gather(*calls, return_exceptions=True))[1:]) == {"done"}
        assert most == 1

    run_virtually(main())
