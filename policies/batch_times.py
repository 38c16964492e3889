"""How far the seconds of batches are from what they should be: learnt from every batch that ends.

A plan is made with the seconds of a table. Where batches of a device are uneven, deadlines that fit
the table's are missed by every second batch; so what they spread is learnt, and left room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# batches that the table itself counts for, and after how many batches one is forgotten
_PRIOR, _MEMORY = 10, 500


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What is known of the ratio of observed to expected seconds.

    Attributes:
        num: batches that it rests on, the prior's among them.
        mean: of the ratios.
        variance: of the ratios around their mean.
    """

    num: float = _PRIOR
    mean: float = 1.0
    variance: float = 0.0

    @property
    def spread(self) -> float:
        """Standard deviation over mean."""
        return math.sqrt(self.variance) / self.mean


def observe_batch(times: BatchTimes, *, took_s: float, expected_s: float) -> BatchTimes:
    """Return what is known after one more batch (West, 1979, with forgetting).

    Raises:
        ValueError: one of the two is not positive.
    """
    if took_s <= 0 or expected_s <= 0:
        raise ValueError(f"batches take time; given {took_s:g} s, {expected_s:g} s expected")
    num = min(times.num + 1, _MEMORY)
    off = took_s / expected_s - times.mean
    mean = times.mean + off / num
    variance = (1 - 1 / num) * (times.variance + off * off / num)
    return BatchTimes(num, mean, variance)
