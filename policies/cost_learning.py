"""Fits the terms of a step's cost to the steps that a replica takes.

A cost is measured in a few steps at start: of one size, without guidance, on an idle machine. Then
other sizes and other work beside it come. A factor (``cost_model.CostResidual``) tracks the speed
of the whole; the division among the terms is fitted here, by a regression on the latest steps that
stays near the measured terms where steps say little: equal batches can't tell a step's fixed part
from that of its pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ray_cluster.policies.cost_model import TimedStep
from ray_cluster.policies.types import StepCost

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# steps that are remembered
MEMORY = 128
_TERMS = ("fixed_s", "per_megapixel_s", "per_squared_megapixel_s", "per_further_size_s")
# by how much equal steps differ, as a share of their seconds
_NOISE = 0.1
# how wrong a measured term may be, in seconds of a typical step over all that this takes
_SPREAD = 0.3
# which part of a measured term is there whatever the steps seem to say
_LEAST = 0.2
# weight of the steps that had anything of a term below which they are too long ago: 1,200 steps
_FORGOTTEN = 1e-4
# a step further off than this factor (a stall, other load) counts as no further off
_MOST_OFF = 2.0


@dataclass(frozen=True)
class StepHistory:
    """Sums over observed steps, the later ones counting more.

    Attributes:
        weight: steps that they stand for.
        seen: [4], how many of them had anything of each term.
        squares: [4, 4], products of the steps' amounts of two terms over their seconds.
        moments: [4], sums of the amounts over the seconds.
    """

    weight: float = 0.0
    seen: Floats | None = None
    squares: Floats | None = None
    moments: Floats | None = None

    @property
    def sums(self) -> tuple[Floats, Floats, Floats]:
        if self.seen is None or self.squares is None or self.moments is None:
            return (
                np.zeros(len(_TERMS)),
                np.zeros((len(_TERMS), len(_TERMS))),
                np.zeros(len(_TERMS)),
            )
        return self.seen, self.squares, self.moments


def clipped_s(seconds: float, expected_s: float) -> float:
    """Return a step's seconds within the factor of the expected ones that counts."""
    return min(max(seconds, expected_s / _MOST_OFF), expected_s * _MOST_OFF)


def observe_step(history: StepHistory, step: TimedStep, *, num_calls: int = 1) -> StepHistory:
    """Return the history after one more step.

    Args:
        step: seconds that are not positive say nothing.
        num_calls: of the model that it took: one, or one for each size.
    """
    if not step.seconds > 0:
        return history
    work = step.work
    num_further = work.num_sizes - 1 if num_calls == 1 else 0
    amounts = np.array([num_calls, work.megapixels, work.squared_megapixels, num_further])
    shares = amounts / step.seconds
    seen, squares, moments = history.sums
    keep = 1 - 1 / MEMORY
    return StepHistory(
        keep * history.weight + 1,
        keep * seen + (shares > 0),
        keep * squares + np.outer(shares, shares),
        keep * moments + shares,
    )


def refitted_cost(measured: StepCost, history: StepHistory) -> StepCost:
    """Return a measured cost with its terms as the observed steps divide it up.

    A typical step takes as long as by the measured cost: the present speed is for the residual. No
    term falls far below the measured one, and one that no recent step had anything of is the
    measured one.
    """
    seen, squares, moments = history.sums
    known = np.array([getattr(measured, name) for name in _TERMS])
    explained = float(known @ squares @ known)
    if history.weight <= 0 or explained <= 0:
        return measured
    level = float(known @ moments) / explained
    # what a term takes of a typical step is off by so much; the steps are, by their noise
    stiffness = (_NOISE / _SPREAD) ** 2 * np.diag(squares) / history.weight
    matrix, aim = squares + np.diag(stiffness), moments + stiffness * level * known
    is_known = (seen > _FORGOTTEN) & (np.diag(matrix) > 0)
    found = _no_less(_LEAST * level * known, matrix, aim, is_known, otherwise=level * known)
    return replace(measured, **dict(zip(_TERMS, (found / level).tolist(), strict=True)))


def _no_less(
    least: Floats, matrix: Floats, aim: Floats, is_known: Bools, *, otherwise: Floats
) -> Floats:
    """Return the x [4] that minimises ``x @ matrix @ x - 2 * aim @ x``.

    Args:
        least: bounds of x, none negative.
        is_known: terms that the matrix says anything of; their part of it is positive definite.
        otherwise: x of the others.
    """
    found = otherwise.copy()
    # in units in which all of them are alike, so that rounding hits none more than the others
    unit = 1 / np.sqrt(np.diag(matrix)[is_known])
    known = matrix[np.ix_(is_known, is_known)] * np.outer(unit, unit)
    rest = unit * aim[is_known] - known @ (least[is_known] / unit)
    root = np.linalg.cholesky(known)
    above, _ = nnls(root.T, np.linalg.solve(root, rest))
    found[is_known] = least[is_known] + unit * above
    return found
