"""Costs of one kind of decision, as samples and as a row of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.stats import percentile
from benchmarks.stopwatch import Stopwatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """CPU milliseconds of one kind of decision at one scale.

    Attributes:
        decision: what is decided, by which policy.
        gpus: how many there are.
        load: what it decides over, in words.
        num_requests: that wait or run; 0 where that is no measure of the load.
        count: decisions that were timed.
        aim_ms: what none of these decisions, or 99 of 100, should take more than; None where
            nothing is aimed at.
        of_all: whether the aim is for all decisions and not for 99 of 100.
        num_proven: allocations that were proven the best; None for anything else.
    """

    decision: str
    gpus: int
    load: str
    num_requests: int
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    aim_ms: float | None = None
    of_all: bool = False
    num_proven: int | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        if self.aim_ms is None:
            return None
        return (self.max_ms if self.of_all else self.p99_ms) <= self.aim_ms


class Samples:
    """CPU seconds of the thread by kind of decision."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, decision: str, call: Callable[[], T]) -> T:
        """Make a decision, and note what it took."""
        with Stopwatch() as watch:
            result = call()
        self.seconds[decision].append(watch.cost.cpu_s)
        return result

    def row(
        self,
        decision: str,
        *,
        gpus: int,
        load: str,
        num_requests: int = 0,
        aim_ms: float | None = None,
        of_all: bool = False,
        num_proven: int | None = None,
    ) -> DecisionCost:
        """Return what a kind of decision took."""
        costs_ms = [1e3 * one for one in self.seconds[decision]]
        return DecisionCost(
            decision,
            gpus,
            load,
            num_requests,
            len(costs_ms),
            p50_ms=percentile(costs_ms, 50),
            p99_ms=percentile(costs_ms, 99),
            max_ms=max(costs_ms),
            aim_ms=aim_ms,
            of_all=of_all,
            num_proven=num_proven,
        )
