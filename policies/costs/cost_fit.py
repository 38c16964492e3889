"""Fits the linear cost of a step to a latency table, and says how well it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.costs.cost_model import (
    StepWork,
    TimedStep,
    further_size_s,
    one_call_s,
)
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow
from ray_cluster.policies.types import StepCost


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fitted cost is from the figures it was fitted to, as shares of each.

    Attributes:
        mean: of the absolute errors.
        worst: the largest of them.
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
    """Fit a step's cost to the steps of a profile that are on one device.

    Terms are not negative, and relative errors count: small batches are as important as large ones.
    Steps of one size give the price of pixels, those of several that of a further size.

    Raises:
        ValueError: there are no such steps of one size.
    """
    rows = [row for row in profile.of("step") if row.key.sp_degree == 1]
    steps = [TimedStep(row_work(row), row.seconds) for row in rows]
    alike = [step for step in steps if step.work.num_sizes == 1]
    if not alike:
        raise ValueError(
            f"the profile {profile.name} has no steps on one device, of images of one size, to fit "
            "a cost to"
        )
    works = [step.work for step in alike]
    terms = np.array([[1.0, work.megapixels, work.squared_megapixels] for work in works])
    fixed_s, linear_s, squared_s = _fit(terms, [step.seconds for step in alike])
    cost = StepCost(
        fixed_s=fixed_s,
        per_megapixel_s=linear_s,
        decode_per_megapixel_s=_decode_per_megapixel_s(profile),
        per_squared_megapixel_s=squared_s,
        source="measured" if profile.kinds == ("measured",) else "modelled",
    )
    cost = replace(cost, per_further_size_s=further_size_s(cost, steps))
    errors = [abs(one_call_s(cost, step.work) / step.seconds - 1) for step in steps]
    return FittedCost(cost, FitError(float(np.mean(errors)), max(errors), len(steps)))


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
    rows_each = 2 if key.uses_guidance else 1
    # of each size: megapixels of an image, and model rows
    sizes = [(one.width_px * one.height_px / 1e6, one.batch * rows_each) for one in key.sizes]
    return StepWork(
        sum(num_rows * megapixels for megapixels, num_rows in sizes),
        sum(num_rows * megapixels**2 for megapixels, num_rows in sizes),
        len(sizes),
    )


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
