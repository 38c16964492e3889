"""CPU seconds of the thread by kind of decision, as rows and aims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from benchmarks.figures import percentile
from benchmarks.harness import Cost, Study

T = TypeVar("T")


class Samples:
    """CPU seconds of the thread by kind of decision."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, decision: str, call: Callable[[], T]) -> T:
        """Make a decision, and note what it took."""
        start = Cost.now()
        result = call()
        self.seconds[decision].append(Cost.now().since(start).cpu_s)
        return result

    def add(
        self,
        study: Study,
        decision: str,
        *,
        gpus: int,
        load: str,
        aim_ms: float | None = None,
        of_all: bool = False,
        **more: Any,
    ) -> None:
        """Add what a kind of decision took.

        Args:
            load: what it decides over, in words.
            aim_ms: what 99 of 100 should take at most, or all (``of_all``); None without an aim.
        """
        ms = [1e3 * one for one in self.seconds[decision]]
        p50, p99 = (percentile(ms, one) for one in (50, 99))
        figures = {"count": len(ms), "p50_ms": p50, "p99_ms": p99, "max_ms": max(ms)}
        study.row("decisions, CPU ms", decision=decision, gpus=gpus, load=load, **figures, **more)
        if aim_ms is not None:
            name = f"{decision}, {gpus} GPUs, {load}: {'all' if of_all else '99 %'}"
            study.at_most(name, aim_ms, max(ms) if of_all else p99, "ms")
