"""What the steps that are taken tell of the terms of their cost.

A cost is measured in a few steps when a replica starts: of one size, without guidance, alone on its
machine. What is served then are other sizes beside each other, and other work next door. A factor
(:class:`ray_cluster.policies.cost_model.CostResidual`) follows how fast all of it goes; which term
takes how much is learnt here, by a regression on the latest steps that leans on what was measured
where they say little: where all batches are alike, they can't tell a step's fixed part from that of
its pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ray_cluster.policies.cost_model import TimedStep
from ray_cluster.policies.types import StepCost

Floats = npt.NDArray[np.float64]

# steps that are remembered
MEMORY = 128
_TERMS = ("fixed_s", "per_megapixel_s", "per_squared_megapixel_s", "per_further_size_s")
# by how much equal steps differ, as a share of their seconds
_NOISE = 0.1
# how wrong a measured term may be, in seconds of a typical step over all that this takes
_SPREAD = 0.3
# which part of a measured term is there whatever the steps seem to say
_LEAST = 0.2


@dataclass(frozen=True)
class StepHistory:
    """Sums over the steps that were seen, the later ones counting more.

    Attributes:
        weight: steps that they stand for.
        squares: [4, 4], of what a step has of each term over its seconds, times the others.
        moments: [4], of the same alone.
    """

    weight: float = 0.0
    squares: Floats | None = None
    moments: Floats | None = None

    @cached_property
    def sums(self) -> tuple[Floats, Floats]:
        """Both of them."""
        if self.squares is None or self.moments is None:
            return np.zeros((len(_TERMS), len(_TERMS))), np.zeros(len(_TERMS))
        return self.squares, self.moments


def remember(history: StepHistory, step: TimedStep, *, num_calls: int = 1) -> StepHistory:
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
    squares, moments = history.sums
    keep = 1 - 1 / MEMORY
    return StepHistory(
        keep * history.weight + 1,
        keep * squares + np.outer(shares, shares),
        keep * moments + shares,
    )


def learnt_cost(measured: StepCost, history: StepHistory) -> StepCost:
    """Return a measured cost with its terms as the remembered steps divide it up.

    A typical one of them takes as long as by the measured cost: how fast the machine is at present
    is not for these to say. No term is much smaller than it was measured.
    """
    squares, moments = history.sums
    known = np.array([getattr(measured, name) for name in _TERMS])
    explained = float(known @ squares @ known)
    if history.weight <= 0 or explained <= 0:
        return measured
    level = float(known @ moments) / explained
    # what a term takes of a typical step is off by so much; the steps are, by their noise
    stiffness = (_NOISE / _SPREAD) ** 2 * np.diag(squares) / history.weight
    matrix, aim = squares + np.diag(stiffness), moments + stiffness * level * known
    found = _no_less(_LEAST * level * known, matrix, aim, unseen=level * known)
    return replace(measured, **dict(zip(_TERMS, (found / level).tolist(), strict=True)))


def _no_less(least: Floats, matrix: Floats, aim: Floats, *, unseen: Floats) -> Floats:
    """Return the x [4] that has the least ``x @ matrix @ x - 2 * aim @ x``.

    Args:
        least: bounds of x, none negative.
        unseen: x of terms that no step had anything of.
    """
    found, is_seen = unseen.copy(), np.diag(matrix) > 0
    seen = matrix[np.ix_(is_seen, is_seen)]
    root = np.linalg.cholesky(seen)
    above, _ = nnls(root.T, np.linalg.solve(root, aim[is_seen] - seen @ least[is_seen]))
    found[is_seen] = least[is_seen] + above
    return found
