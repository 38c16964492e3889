"""Open-loop arrivals of several sizes and step counts, and how good the predictions were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LOADS = (0.7, 1.0, 1.3)
SLO_TIMES_ALONE = 5.0
MEDIAN_AIM, P95_AIM, FALSE_AIM = 10.0, 25.0, 5.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Squares of these sides in equal shares, and the fewest and most denoising steps."""

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


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one request.

    Attributes:
        predicted_s: seconds from its arrival to its end, predicted at its admission.
        took_s: seconds that it took; None for one that was refused or failed.
    """

    is_accepted: bool
    slo_s: float
    predicted_s: float = 0.0
    took_s: float | None = None

    @property
    def is_in_time(self) -> bool:
        """Whether it was done by its deadline."""
        return self.took_s is not None and self.took_s <= self.slo_s


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


def figures(ended: Sequence[Ended], unrefused: Sequence[Ended]) -> dict[str, Any]:
    """Return the figures of a trace, in percent.

    Errors are |predicted - real| / real over requests that were made; ``late`` is a share of the
    accepted ones, all others of the arrivals. A refusal is false if the request is in time where
    the same trace is run with nobody refused.

    Raises:
        ValueError: nothing was made, or the two are not of the same trace.
    """
    made = [(one.predicted_s, one.took_s) for one in ended if one.took_s is not None]
    if not made:
        raise ValueError("nothing was made: there is no prediction to judge")
    predicted_s, took_s = np.array(made).T
    errors = np.abs(predicted_s - took_s) / took_s
    accepted = [one for one in ended if one.is_accepted]
    num_false = sum(
        not one.is_accepted and other.is_in_time
        for one, other in zip(ended, unrefused, strict=True)
    )
    shares = {
        "error_median": float(np.median(errors)),
        "error_p95": float(np.quantile(errors, 0.95)),
        "refused": 1 - len(accepted) / len(ended),
        "late": sum(not one.is_in_time for one in accepted) / len(accepted),
        "false_refusals": num_false / len(ended),
        "in_time": sum(one.is_in_time for one in ended) / len(ended),
    }
    return {name: round(100 * share, 2) for name, share in shares.items()}
