"""What rows of an experiment say: means over cells and seeds, and differences seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ray_cluster.simulator.intervals import Mean, mean_of, paired_difference
from ray_cluster.simulator.sp_experiment import SpCondition, SpRow


def mean_attainment(rows: Iterable[SpRow], policy: str, cells: Iterable[SpCondition]) -> Mean:
    """Return a policy's attainment, mean over cells, over the seeds that it ran on in all."""
    by_seed = _by_seed(rows, policy, cells)
    return mean_of([by_seed[seed] for seed in sorted(by_seed)])


def paired_gain(
    rows: Iterable[SpRow], first: str, second: str, cells: Iterable[SpCondition]
) -> Mean:
    """Return by how much the first policy is above the second, paired by seed."""
    rows, cells = list(rows), list(cells)
    ours, theirs = _by_seed(rows, first, cells), _by_seed(rows, second, cells)
    seeds = sorted(ours.keys() & theirs.keys())
    return paired_difference([ours[one] for one in seeds], [theirs[one] for one in seeds])


def class_attainment(rows: Iterable[SpRow], policy: str, cell: SpCondition) -> dict[str, Mean]:
    """Return a policy's attainment by class, over the seeds in which requests of it came."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        if (row.policy, row.cell) == (policy, cell):
            for name, share in row.attainment_by_class:
                shares.setdefault(name, []).append(share)
    return {name: mean_of(values) for name, values in shares.items()}


def _by_seed(rows: Iterable[SpRow], policy: str, cells: Iterable[SpCondition]) -> dict[int, float]:
    """Mean over cells by seed, of seeds that ran in all of them."""
    wanted = set(cells)
    values: dict[int, dict[SpCondition, float]] = {}
    for row in rows:
        if row.policy == policy and row.cell in wanted:
            values.setdefault(row.seed, {})[row.cell] = row.attainment
    return {
        seed: math.fsum(one.values()) / len(wanted)
        for seed, one in values.items()
        if len(one) == len(wanted)
    }
