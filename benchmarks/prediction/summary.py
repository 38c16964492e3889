"""What became of one trace, and how far off its predictions were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MEDIAN_AIM, P95_AIM, FALSE_AIM = 0.10, 0.25, 0.05


@dataclass(frozen=True, slots=True)
class Fared:
    """One request.

    Attributes:
        predicted_s: seconds from its arrival to its end, as they were predicted when it was let in.
        took_s: what it really took; None for one that was refused or not made.
    """

    is_let_in: bool
    slo_s: float
    predicted_s: float = 0.0
    took_s: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it was done in time."""
        return self.took_s is not None and self.took_s <= self.slo_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a trace.

    Attributes:
        error_median: of \\|predicted - real\\| / real over those that were let in and made.
        bias: median of predicted over real.
        refused: share of the arrivals.
        late: share of those let in.
        false: share of the arrivals that were refused and are in time where the same trace is run
            with nobody refused.
        attainment: share of the arrivals that were done in time.
    """

    num_arrivals: int
    num_made: int
    error_median: float
    error_p95: float
    bias: float
    refused: float
    late: float
    false: float
    attainment: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def summarise(fared: Sequence[Fared], unrefused: Sequence[Fared]) -> Summary:
    """Return the figures of a trace.

    Args:
        fared: how each arrival fared.
        unrefused: how the same arrivals fared where all were let in.

    Raises:
        ValueError: nothing was made, or the two are not of the same trace.
    """
    made = [(one.predicted_s, one.took_s) for one in fared if one.took_s is not None]
    if not made:
        raise ValueError("nothing was made: there is no prediction to judge")
    predicted_s, took_s = np.array(made).T
    errors = np.abs(predicted_s - took_s) / took_s
    let_in = [one for one in fared if one.is_let_in]
    false = sum(
        not one.is_let_in and other.is_met for one, other in zip(fared, unrefused, strict=True)
    )
    return Summary(
        num_arrivals=len(fared),
        num_made=len(made),
        error_median=float(np.median(errors)),
        error_p95=float(np.quantile(errors, 0.95)),
        bias=float(np.median(predicted_s / took_s)),
        refused=1 - len(let_in) / len(fared),
        late=sum(not one.is_met for one in let_in) / len(let_in),
        false=false / len(fared),
        attainment=sum(one.is_met for one in fared) / len(fared),
    )
