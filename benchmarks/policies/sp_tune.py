"""Chooses the baselines of every cell on the tuning seeds, and writes them down.

``python -m benchmarks.policies.sp_tune`` takes some four minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

from ray_cluster.simulator.choice_files import save_choices
from ray_cluster.simulator.sp_experiment import TUNING_SEEDS, SpCondition, SpExperiment
from ray_cluster.simulator.sp_tuning import (
    BEST_FIXED,
    BEST_KNAPSACK,
    BEST_STATIC,
    TunedPolicy,
    choose,
)

CHOICES = Path(__file__).with_name("sp_choices.json")
A = SpExperiment(seeds=TUNING_SEEDS, rates_per_min=(6.0, 9.0, 12.0, 15.0, 18.0))
B = SpExperiment(
    profile="flux-h100-b",
    seeds=TUNING_SEEDS,
    rates_per_min=(6.0, 12.0, 18.0),
    scales=(1.0, 1.3, 1.5),
)
# rounds are slow to simulate: nine variants on fewer seeds, at the rates that are reported for them
KNAPSACK_SEEDS = TUNING_SEEDS[:4]
KNAPSACK_RATES = (12.0, 18.0)


def tasks() -> Iterator[tuple[SpExperiment, SpCondition, str]]:
    """All searches: where, and of what family."""
    for experiment in (A, B):
        for cell in experiment.cells():
            yield experiment, cell, BEST_STATIC
            yield experiment, cell, BEST_FIXED
            if cell.rate_per_min in KNAPSACK_RATES:
                yield replace(experiment, seeds=KNAPSACK_SEEDS), cell, BEST_KNAPSACK


def search(task: tuple[SpExperiment, SpCondition, str]) -> TunedPolicy:
    return choose(*task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=CHOICES)
    options = parser.parse_args()
    with Pool(options.processes) as pool:
        choices = pool.map(search, list(tasks()), chunksize=2)
    save_choices(options.out, choices)


if __name__ == "__main__":
    main()
