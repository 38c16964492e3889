"""Fits the terms of a step's cost to the steps that a replica takes.

A cost is measured in a few steps at start: of one size, without guidance, on an idle machine. Then
other sizes and other work beside it come. A factor (``cost_model.CostResidual``) tracks the speed
of the whole; the division among the terms is fitted here, by a regression on the latest steps that
stays near the measured terms where steps say little: equal batches can't tell a step's fixed part
from that of its pixels. What ControlNets add is a term of that regression, so that steps with them
make rows without them no dearer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ray_cluster.policies.costs.cost_model import (
    ExtraWork,
    StepWork,
    TimedStep,
    control_share,
    plain_work,
    step_s,
)
from ray_cluster.policies.types import StepCost

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# steps that are remembered
MEMORY = 128
_TERMS = ("fixed_s", "per_megapixel_s", "per_squared_megapixel_s", "per_further_size_s")
# beside these terms, seconds of a ControlNet per megapixel of a row
_NUM = len(_TERMS) + 1
# by how much equal steps differ, as a share of their seconds
_NOISE = 0.1
# how wrong a measured term may be, in seconds of a typical step over all that this takes
_SPREAD = 0.3
# which part of a measured term is there whatever the steps seem to say; a ControlNet may be hidden
# by the base's own first half
_LEAST = np.array([0.2] * len(_TERMS) + [0.0])
# weight of the steps that had anything of a term below which they are too long ago: 1,200 steps
_FORGOTTEN = 1e-4
# a step further off than this factor (a stall, other load) counts as no further off
_MOST_OFF = 2.0
# of SDXL (SwiftDiffusion): a ControlNet over the first half of its base's step, which is this part
# of a step
_CONTROL_OVER_HALF = 1.1
_HALF_OF_STEP = 0.45
# of a step's latents and residuals between processes
_ROUND_TRIP_S = 0.001


@dataclass(frozen=True)
class StepHistory:
    """Sums over observed steps, the later ones counting more.

    Attributes:
        weight: steps that they stand for.
        seen: [5], how many of them had anything of each term.
        squares: [5, 5], products of the steps' amounts of two terms over their seconds.
        moments: [5], sums of the amounts over the seconds.
    """

    weight: float = 0.0
    seen: Floats | None = None
    squares: Floats | None = None
    moments: Floats | None = None

    @property
    def sums(self) -> tuple[Floats, Floats, Floats]:
        if self.seen is None or self.squares is None or self.moments is None:
            return np.zeros(_NUM), np.zeros((_NUM, _NUM)), np.zeros(_NUM)
        return self.seen, self.squares, self.moments


def clipped_s(seconds: float, expected_s: float) -> float:
    """Return a step's seconds within the factor of the expected ones that counts."""
    return min(max(seconds, expected_s / _MOST_OFF), expected_s * _MOST_OFF)


def fitted_work(cost: StepCost, work: StepWork) -> StepWork:
    """Return the work that terms are fitted to: LoRAs and masks have become pixels of equal cost.

    Their shares are measured ones; the share of ControlNets is fitted, so they stay apart.
    """
    others = plain_work(replace(cost, control_share=0.0), work)
    if work.extra is None or not work.extra.control_megapixels:
        return others
    controls = work.extra.control_megapixels, work.extra.control_squared_megapixels
    return replace(others, extra=ExtraWork(*controls))


def remote_controlnet_share(cost: StepCost, size_px: tuple[int, int], num_together: int) -> float:
    """Return what a ControlNet in another process probably adds, as long as no step has shown it.

    It computes beside the base's first half and takes a little longer (SwiftDiffusion, section 2);
    what is left of it, and the way there and back, make a step longer. Without other load: on
    a machine that both share the steps will soon show more.

    Args:
        cost: of steps without any.
        size_px: of the images of a full batch, without guidance.
        num_together: images of that batch.
    """
    megapixels = size_px[0] * size_px[1] / 1e6
    each = (megapixels * num_together, megapixels**2 * num_together)
    alone_s = step_s(cost, StepWork(*each))
    longer_s = (_CONTROL_OVER_HALF - 1) * _HALF_OF_STEP * alone_s + _ROUND_TRIP_S
    work = StepWork(*each, extra=ExtraWork(*each))
    return control_share(cost, [TimedStep(work, alone_s + longer_s)])


def observe_step(
    history: StepHistory, step: TimedStep, cost: StepCost, *, num_calls: int = 1
) -> StepHistory:
    """Return the history after one more step.

    Args:
        step: its work as :func:`fitted_work` has it; seconds that are not positive say nothing.
        cost: as it is fitted by now, which says what ControlNets take of a row's pixels and what
            of their squares.
        num_calls: of the model that it took: one, or one for each size.
    """
    if not step.seconds > 0:
        return history
    work = step.work
    num_further = work.num_sizes - 1 if num_calls == 1 else 0
    plain = (num_calls, work.megapixels, work.squared_megapixels, num_further)
    amounts = np.array([*plain, _control_megapixels(cost, work)])
    shares = amounts / step.seconds
    seen, squares, moments = history.sums
    keep = 1 - 1 / MEMORY
    return StepHistory(
        keep * history.weight + 1,
        keep * seen + (shares > 0),
        keep * squares + np.outer(shares, shares),
        keep * moments + shares,
    )


def _control_megapixels(cost: StepCost, work: StepWork) -> float:
    """Return the megapixels of rows that cost as much as what ControlNets do whole."""
    if work.extra is None or not cost.per_megapixel_s:
        return 0.0
    of_square = cost.per_squared_megapixel_s / cost.per_megapixel_s
    return work.extra.control_megapixels + of_square * work.extra.control_squared_megapixels


def refitted_cost(measured: StepCost, history: StepHistory) -> StepCost:
    """Return a measured cost with its terms as the observed steps divide it up.

    A typical step takes as long as by the measured cost: the present speed is for the residual. No
    term falls far below the measured one, and one that no recent step had anything of is the
    measured one.
    """
    seen, squares, moments = history.sums
    known = np.array([getattr(measured, name) for name in _TERMS])
    known = np.append(known, measured.control_share * measured.per_megapixel_s)
    explained = float(known @ squares @ known)
    if history.weight <= 0 or explained <= 0:
        return measured
    level = float(known @ moments) / explained
    # what a term takes of a typical step is off by so much; the steps are, by their noise
    stiffness = (_NOISE / _SPREAD) ** 2 * np.diag(squares) / history.weight
    matrix, aim = squares + np.diag(stiffness), moments + stiffness * level * known
    is_known = (seen > _FORGOTTEN) & (np.diag(matrix) > 0)
    found = _no_less(_LEAST * level * known, matrix, aim, is_known, otherwise=level * known)
    # a typical step without its ControlNets takes as long as by the measured cost
    plain = squares[:-1, :-1] @ known[:-1]
    terms = found * float(plain @ known[:-1]) / float(plain @ found[:-1])
    terms[~is_known] = known[~is_known]
    fitted = replace(measured, **dict(zip(_TERMS, terms[:-1].tolist(), strict=True)))
    if not is_known[-1] or not fitted.per_megapixel_s:
        return fitted
    return replace(fitted, control_share=float(terms[-1]) / fitted.per_megapixel_s)


def _no_less(
    least: Floats, matrix: Floats, aim: Floats, is_known: Bools, *, otherwise: Floats
) -> Floats:
    """Return the x [5] that minimises ``x @ matrix @ x - 2 * aim @ x``.

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
