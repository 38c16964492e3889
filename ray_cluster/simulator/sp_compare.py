"""What rows of an experiment say: means over seeds, and differences seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ray_cluster.simulator.sp_experiment import Cell, Row


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half the width of its 95 % interval."""

    mean: float
    half_width: float
    num_seeds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per seed, with its 95 % interval by Student's t."""
    count = len(values)
    if count < 2:
        return Estimate(float(np.mean(values)), math.inf, count)
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Estimate(float(np.mean(values)), float(half), count)


def mean_attainment(rows: Iterable[Row], policy: str, cells: Iterable[Cell]) -> Estimate:
    """Return a policy's attainment, mean over cells, over the seeds that it ran on in all."""
    by_seed = _by_seed(rows, policy, cells)
    return estimate([by_seed[seed] for seed in sorted(by_seed)])


def paired_difference(
    rows: Iterable[Row], first: str, second: str, cells: Iterable[Cell]
) -> Estimate:
    """Return by how many points the first policy is above the second, paired by seed."""
    rows, cells = list(rows), list(cells)
    ours, theirs = _by_seed(rows, first, cells), _by_seed(rows, second, cells)
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def _by_seed(rows: Iterable[Row], policy: str, cells: Iterable[Cell]) -> dict[int, float]:
    """Mean over cells by seed, of seeds that ran in all of them."""
    wanted = set(cells)
    values: dict[int, dict[Cell, float]] = {}
    for row in rows:
        if row.policy == policy and row.cell in wanted:
            values.setdefault(row.seed, {})[row.cell] = row.attainment
    return {
        seed: math.fsum(one.values()) / len(wanted)
        for seed, one in values.items()
        if len(one) == len(wanted)
    }
