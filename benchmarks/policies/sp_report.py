"""Prints the figures of sequence-parallel policies; all of them are simulated, on modelled times.

``python -m benchmarks.policies.sp_report`` takes some ten minutes on two cores; ``--only`` names
experiments of :mod:`benchmarks.policies.sp_experiments`, and ``--fleet`` is the hour of 300,000
requests on 128 groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from multiprocessing import Pool

import numpy as np

from benchmarks.policies.sp_experiments import CHOICES, EXPERIMENTS, GUARDED, OURS, WIDEST
from benchmarks.stopwatch import Stopwatch
from ray_cluster.simulator.sp_compare import Estimate, mean_attainment, paired_difference
from ray_cluster.simulator.sp_experiment import (
    BOUND,
    Cell,
    Row,
    SpExperiment,
    run_experiment,
    workload_of,
)
from ray_cluster.simulator.sp_fleet import run_fleet
from ray_cluster.simulator.sp_policies import planner_of
from ray_cluster.simulator.sp_tuning import BEST_STATIC, load_choices

FLEET_REQUESTS, FLEET_GROUPS, FLEET_CELL = 300_000, 128, Cell("uniform", 5000.0, 1.3)
LARGEST = "2048"


def run(experiment: SpExperiment, processes: int) -> list[Row]:
    choices = load_choices(CHOICES, experiment.profile)
    with Pool(processes) as pool:
        return list(
            run_experiment(
                experiment, choices, lambda one, units: pool.imap(one, units, chunksize=4)
            )
        )


def show(name: str, experiment: SpExperiment, rows: Sequence[Row]) -> None:
    print(f"\n{name}: simulated on {experiment.profile}, {len(experiment.seeds)} seeds")
    for mix in experiment.mixes:
        for rate in experiment.rates_per_min:
            cells = [
                cell for cell in experiment.cells() if (cell.mix, cell.rate_per_min) == (mix, rate)
            ]
            print(f"  {mix}, {rate:g}/min, mean over scales")
            for policy in experiment.policies:
                ahead = paired_difference(rows, OURS, policy, cells)
                level = mean_attainment(rows, policy, cells).mean
                print(f"    {policy:18} {level:6.2f}   ours less this {text(ahead)}")
            for cell in cells:
                show_cell(cell, experiment, rows)


def show_cell(cell: Cell, experiment: SpExperiment, rows: Sequence[Row]) -> None:
    parts = [f"    scale {cell.scale}: ours {mean_attainment(rows, OURS, [cell]).mean:.1f}"]
    parts += [
        f"less {policy} {text(paired_difference(rows, OURS, policy, [cell]))}"
        for policy in (BEST_STATIC, WIDEST, BOUND)
        if policy in experiment.policies
    ]
    if GUARDED in experiment.policies:
        lost = paired_difference(rows, GUARDED, OURS, [cell])
        by_class = [class_mean(rows, one, cell) for one in (GUARDED, OURS, BEST_STATIC)]
        parts.append(f"guard {text(lost)}, {LARGEST} guarded/ours/static")
        parts.append("/".join(f"{one:.1f}" for one in by_class))
    print(", ".join(parts))


def class_mean(rows: Sequence[Row], policy: str, cell: Cell) -> float:
    levels = [
        dict(row.attainment_by_class)[LARGEST]
        for row in rows
        if row.policy == policy and row.cell == cell
    ]
    return float(np.mean(levels))


def text(one: Estimate) -> str:
    return f"{one.mean:+.2f} ± {one.half_width:.2f}"


def show_fleet() -> None:
    experiment = SpExperiment(num_arrivals=FLEET_REQUESTS)
    menus, tasks = workload_of(experiment, FLEET_CELL, seed=1000)
    with Stopwatch() as watch:
        fleet = run_fleet(
            tasks,
            planner_of(OURS, menus),
            num_groups=FLEET_GROUPS,
            num_gpus=experiment.num_gpus,
            switch_s=experiment.switch_s,
        )
    print(
        f"{fleet.num_requests} requests in {tasks[-1].arrival_s:.0f} simulated s on "
        f"{FLEET_GROUPS} groups: {watch.cost.cpu_s:.1f} s of CPU, {watch.cost.wall_s:.1f} s of "
        f"wall; {fleet.num_decisions} decisions, {fleet.num_events} events, "
        f"{100 * fleet.num_on_time / fleet.num_requests:.1f} % on time (simulated)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=tuple(EXPERIMENTS))
    parser.add_argument("--fleet", action="store_true", help="only the fleet")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.fleet:
        show_fleet()
        return
    for name in options.only or EXPERIMENTS:
        show(name, EXPERIMENTS[name], run(EXPERIMENTS[name], options.processes))


if __name__ == "__main__":
    main()
