"""How many requests will come, from how many came.

Arrivals are counted, not requests in flight: those grow with every delay, so demand would seem to
rise because the system is slow. A plan lives until the next one takes effect, which a load delays
by tens of seconds, and a moving average alone is late by its own time constant. So the estimate has

- a level and a slope (Holt's double smoothing), with the slope damped when looking ahead;
- an index of dispersion (variance over mean of counts: 1 for a Poisson process, the square of the
  CV for bursts), from the one-step errors;
- a quantile: the rate that arrivals during a window exceed in few cases only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

# a slope counts for as long ahead as it was seen, and no longer than this many time constants
_DAMPING = 4.0
_LEAST_DISPERSION = 1.0
# levels kept to know a recent peak
_NUM_LEVELS = 256


@dataclass(frozen=True, slots=True)
class DemandSmoothing:
    """Time constants of an estimate.

    Attributes:
        level_s: of the level.
        slope_s: of the slope.
        dispersion_s: of the index of dispersion.
        peak_s: how long a level counts as a recent peak.
    """

    level_s: float = 10.0
    slope_s: float = 20.0
    dispersion_s: float = 120.0
    peak_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The estimate of one service's arrivals.

    Attributes:
        seen_s: instant of the last count.
        num_arrived: the counter's value then.
        level_per_s: smoothed rate; None before a second count.
        slope_per_s2: change of the rate per second.
        dispersion: variance of counts over their mean.
        levels: recent instants and levels.
    """

    seen_s: float
    num_arrived: float
    level_per_s: float | None = None
    slope_per_s2: float = 0.0
    dispersion: float = _LEAST_DISPERSION
    levels: tuple[tuple[float, float], ...] = ()

    @property
    def recent_peak_per_s(self) -> float:
        return max((level for _, level in self.levels), default=0.0)


def count(demand: Demand, now_s: float, num_arrived: float, smoothing: DemandSmoothing) -> Demand:
    """Return the estimate after one more reading of the arrival counter.

    A counter that fell was restarted and says nothing about the time before.
    """
    passed_s, num_new = now_s - demand.seen_s, num_arrived - demand.num_arrived
    if num_new < 0:
        return replace(demand, seen_s=now_s, num_arrived=num_arrived)
    if passed_s <= 0:
        return demand
    rate = num_new / passed_s
    if demand.level_per_s is None:
        level, slope, dispersion = rate, 0.0, demand.dispersion
    else:
        expected = max(0.0, demand.level_per_s + demand.slope_per_s2 * passed_s)
        level = expected + _weight(passed_s, smoothing.level_s) * (rate - expected)
        seen_slope = (level - demand.level_per_s) / passed_s
        slope_step = seen_slope - demand.slope_per_s2
        slope = demand.slope_per_s2 + _weight(passed_s, smoothing.slope_s) * slope_step
        surprise = (num_new - expected * passed_s) ** 2 / max(expected * passed_s, 1.0)
        dispersion_step = surprise - demand.dispersion
        weight = _weight(passed_s, smoothing.dispersion_s)
        dispersion = max(_LEAST_DISPERSION, demand.dispersion + weight * dispersion_step)
    fresh = [one for one in demand.levels if one[0] > now_s - smoothing.peak_s]
    return Demand(
        seen_s=now_s,
        num_arrived=num_arrived,
        level_per_s=level,
        slope_per_s2=slope,
        dispersion=dispersion,
        levels=(*fresh, (now_s, level))[-_NUM_LEVELS:],
    )


def forecast_per_s(demand: Demand, ahead_s: float, smoothing: DemandSmoothing) -> float:
    """Return the expected mean rate so many seconds ahead; the slope is damped exponentially."""
    if demand.level_per_s is None:
        return 0.0
    horizon_s = _DAMPING * smoothing.slope_s
    damped_s = horizon_s * -math.expm1(-ahead_s / horizon_s)
    return max(0.0, demand.level_per_s + demand.slope_per_s2 * damped_s)


def quantile_per_s(mean_per_s: float, dispersion: float, window_s: float, quantile: float) -> float:
    """Return the rate that arrivals during a window stay below with that probability.

    Counts over a window are about normal with the variance ``dispersion * mean``. The window is the
    time in which a queue may absorb a burst.

    Raises:
        ValueError: the quantile is not between 0 and 1.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"a quantile lies between 0 and 1; given {quantile}")
    num_expected = mean_per_s * window_s
    z = NormalDist().inv_cdf(quantile)
    return max(0.0, num_expected + z * math.sqrt(dispersion * num_expected)) / window_s


def _weight(passed_s: float, constant_s: float) -> float:
    """Weight of a reading, so that two short intervals count as one long one."""
    return -math.expm1(-passed_s / constant_s)
