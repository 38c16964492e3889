"""How many requests will come, from how many came: arrivals are counted, never requests in flight.

Requests in flight grow with every delay, so a demand read from them rises because the system is
slow, which is when it must not. Counts of arrivals know nothing of delays.

A plan lives until the next one has taken effect, which a load delays by tens of seconds. A moving
average alone is late by its own time constant on a slope; DiffServe multiplies by 1.05 (section
3.3), which neither covers a morning nor a burst. So the estimate here has three parts:

- a level and a slope (Holt's double smoothing), with the slope damped when looking ahead;
- the spread of counts around it, as an index of dispersion (variance over mean: 1 for a Poisson
  process, the square of the CV for bursts), learnt from the one-step errors;
- a quantile: so much more than the mean as arrivals during a window exceed it in few cases.
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
    """How fast an estimate follows.

    Attributes:
        level_s: time constant of the level.
        slope_s: time constant of the slope.
        dispersion_s: time constant of the index of dispersion.
        peak_s: how long a level is remembered as a recent peak.
    """

    level_s: float = 10.0
    slope_s: float = 20.0
    dispersion_s: float = 120.0
    peak_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of the arrivals of one service.

    Attributes:
        seen_s: instant of the last count.
        num_arrived: the counter's value then.
        level_per_s: smoothed rate; None before a second count.
        slope_per_s2: by how much the rate changes per second.
        dispersion: variance of counts over their mean.
        levels: instants and levels of late, for a recent peak.
    """

    seen_s: float
    num_arrived: int
    level_per_s: float | None = None
    slope_per_s2: float = 0.0
    dispersion: float = _LEAST_DISPERSION
    levels: tuple[tuple[float, float], ...] = ()

    @property
    def recent_peak_per_s(self) -> float:
        """The highest level that is remembered."""
        return max((level for _, level in self.levels), default=0.0)


def count(demand: Demand, now_s: float, num_arrived: int, smoothing: DemandSmoothing) -> Demand:
    """Return the estimate after one more reading of the arrival counter.

    A counter that fell was restarted and says nothing about the time before; readings without time
    between them are ignored.
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
    """Return the mean rate that is expected so many seconds ahead.

    The slope is damped exponentially: a morning is carried on, a burst is not carried on for ever.
    """
    if demand.level_per_s is None:
        return 0.0
    horizon_s = _DAMPING * smoothing.slope_s
    damped_s = horizon_s * -math.expm1(-ahead_s / horizon_s)
    return max(0.0, demand.level_per_s + demand.slope_per_s2 * damped_s)


def quantile_per_s(mean_per_s: float, dispersion: float, window_s: float, quantile: float) -> float:
    """Return the rate that arrivals during a window stay below with that probability.

    Counts over a window have the variance ``dispersion * mean``, and are about normal. The window
    is the time that a queue may take to absorb a burst: what exceeds it there is late.

    Raises:
        ValueError: the quantile is not between 0 and 1.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"a quantile lies between 0 and 1; given {quantile}")
    num_expected = mean_per_s * window_s
    z = NormalDist().inv_cdf(quantile)
    return max(0.0, num_expected + z * math.sqrt(dispersion * num_expected)) / window_s


def _weight(passed_s: float, constant_s: float) -> float:
    """What a reading counts, so that two short intervals weigh as one long one."""
    return -math.expm1(-passed_s / constant_s)
