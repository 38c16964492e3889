"""From a latency table to the linear cost of a step, and how well it tells the table's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ray_cluster.policies.allocation_problem import BatchOption
from ray_cluster.policies.cost_model import StepWork, step_s
from ray_cluster.policies.latency import LatencyProfile, LatencyRow
from ray_cluster.policies.types import StepCost


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fitted cost is from the figures it was fitted to, as shares of each.

    Attributes:
        mean: of the absolute errors.
        worst: the largest of them.
        num_rows: figures.
    """

    mean: float
    worst: float
    num_rows: int


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A step's cost, with its error over the steps of the table."""

    cost: StepCost
    error: FitError


def fit_step_cost(profile: LatencyProfile) -> FittedCost:
    """Fit a step's cost to the rows of a profile that are steps on one device.

    Terms are not negative, and relative errors count: a small batch is as important as a large
    one. A table that holds no attention to speak of gets none.

    Raises:
        ValueError: there are no such rows.
    """
    rows = [row for row in profile.of("step") if row.key.sp_degree == 1]
    if not rows:
        raise ValueError(f"the profile {profile.name} has no steps on one device to fit a cost to")
    works = [row_work(row) for row in rows]
    terms = np.array([[1.0, work.megapixels, work.squared_megapixels] for work in works])
    fixed_s, linear_s, squared_s = _fit(terms, [row.seconds for row in rows])
    cost = StepCost(
        fixed_s=fixed_s,
        per_megapixel_s=linear_s,
        decode_per_megapixel_s=_decode_per_megapixel_s(profile),
        per_squared_megapixel_s=squared_s,
        source="measured" if profile.kinds == ("measured",) else "modelled",
    )
    errors = [
        abs(step_s(cost, work) / row.seconds - 1) for work, row in zip(works, rows, strict=True)
    ]
    return FittedCost(cost, FitError(float(np.mean(errors)), max(errors), len(rows)))


def fit_image_cost(options: Sequence[BatchOption], megapixels: float) -> StepCost:
    """Fit the cost of whole images, each of which is one step without guidance.

    Args:
        options: batches and their seconds.
        megapixels: of each image.
    """
    terms = np.array([[1.0, one.batch * megapixels] for one in options])
    fixed_s, linear_s = _fit(terms, [one.seconds for one in options])
    return StepCost(fixed_s=fixed_s, per_megapixel_s=linear_s, source="modelled")


def row_work(row: LatencyRow) -> StepWork:
    """Return what a step of the row's batch computes."""
    key = row.key
    num_rows = key.batch * (2 if key.uses_guidance else 1)
    megapixels = key.width_px * key.height_px / 1e6
    return StepWork(num_rows * megapixels, num_rows * megapixels**2)


def _decode_per_megapixel_s(profile: LatencyProfile) -> float:
    rows = profile.of("decode")
    if not rows:
        return 0.0
    pixels = [row.key.width_px * row.key.height_px * row.key.batch / 1e6 for row in rows]
    return _fit(np.array(pixels)[:, None], [row.seconds for row in rows])[0]


def _fit(terms: npt.NDArray[np.float64], figures_s: Sequence[float]) -> list[float]:
    """Non-negative coefficients of terms ``[rows, terms]`` with least relative error."""
    seconds = np.array(figures_s)
    # terms of one size, so that the solver's tolerance suits all of them
    scale = np.abs(terms).max(axis=0)
    found, _ = nnls(terms / scale / seconds[:, None], np.ones(len(seconds)))
    return [float(value) for value in found / scale]
