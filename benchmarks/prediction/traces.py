"""Open-loop arrivals of several sizes and step counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

LOADS = (0.7, 1.0, 1.3)
SLO_TIMES_ALONE = 5.0


@dataclass(frozen=True, slots=True)
class Mix:
    """What comes: squares of these sides in equal shares.

    Attributes:
        steps: fewest and most denoising steps, uniformly drawn.
    """

    name: str
    sides_px: tuple[int, ...]
    steps: tuple[int, int]

    @property
    def mean_steps(self) -> float:
        """Steps of a request on average."""
        return sum(self.steps) / 2


@dataclass(frozen=True, slots=True)
class Planned:
    """One arrival."""

    at_s: float
    side_px: int
    num_steps: int
    slo_s: float = 0.0


def draw_trace(
    mix: Mix, count: int, *, rate_per_s: float, alone_s: Callable[[Planned], float], seed: int
) -> Sequence[Planned]:
    """Return Poisson arrivals; deadlines are five times what a request takes alone."""
    rng = np.random.default_rng([seed, 7])
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    sides = rng.choice(mix.sides_px, count)
    steps = rng.integers(mix.steps[0], mix.steps[1] + 1, count)
    plan = [
        Planned(float(when), int(side), int(num))
        for when, side, num in zip(at_s, sides, steps, strict=True)
    ]
    return [replace(one, slo_s=SLO_TIMES_ALONE * alone_s(one)) for one in plan]
