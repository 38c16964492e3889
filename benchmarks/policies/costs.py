"""What sequence-parallel policies cost: one decision, and the hour of a large fleet.

``python -m benchmarks.policies.costs`` prints both; ``--only decisions`` or ``--only fleet`` one.
Decisions: CPU milliseconds of the thread, and of the wall clock, over random groups of 64 requests
in which up to 8 GPUs run some and the others wait. The fleet: 300,000 requests on 128 groups,
simulated on modelled times.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.stopwatch import Stopwatch
from ray_cluster.policies.sp_types import DegreeMenu, GroupRequest, GroupView
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.sp_experiment import Cell, SpExperiment, workload_of
from ray_cluster.simulator.sp_fleet import run_fleet
from ray_cluster.simulator.sp_policies import planner_of
from ray_cluster.simulator.sp_workload import FLUX_CLASSES, menus_of

NUM_GPUS = 8
NUM_STEPS = 50
OURS = "rounds/most"
POLICIES = (OURS, "rounds/large", "widest", "knapsack/5/grid", "static/8-8-8-8/edf")
FLEET_CELL = Cell("uniform", 5000.0, 1.3)
PARTS = ("decisions", "fleet")


@dataclass(frozen=True, slots=True)
class Crowd:
    """Groups of one sort.

    Attributes:
        sides_px: sizes of the images, in equal shares.
        scale: of their deadlines.
    """

    name: str
    sides_px: tuple[int, ...]
    scale: float


CROWDS = (
    Crowd("all sizes, most given up", (256, 512, 1024, 2048), 1.3),
    Crowd("smallest, a third given up", (256,), 1.5),
    Crowd("small, half given up", (256, 512), 1.5),
    Crowd("large, most given up", (1024, 2048), 1.5),
    Crowd("all sizes, few given up", (256, 512, 1024, 2048), 10.0),
    Crowd("all sizes, nobody given up", (256, 512, 1024, 2048), 30.0),
)


def draw_group(
    crowd: Crowd, menus: Mapping[str, DegreeMenu], count: int, rng: np.random.Generator
) -> GroupView:
    """Return a group of so many requests at random points of their lives."""
    classes = [one for one in FLUX_CLASSES if one.side_px in crowd.sides_px]
    free, requests = NUM_GPUS, []
    for number in range(count):
        one = classes[int(rng.integers(len(classes)))]
        degree = int(min(rng.choice([1, 2, 4, 8]), 2 ** (free.bit_length() - 1))) if free else 0
        free -= degree
        requests.append(
            _draw_request(number, menus[str(one.side_px)], crowd.scale * one.slo_s, degree, rng)
        )
    return GroupView(NUM_GPUS, 0.0, tuple(requests), switch_s=0.01)


def _draw_request(
    number: int, menu: DegreeMenu, slo_s: float, degree: int, rng: np.random.Generator
) -> GroupRequest:
    arrival_s = -float(rng.uniform(0.0, slo_s / 2))
    steps_left = int(rng.integers(1, NUM_STEPS + 1))
    return GroupRequest(
        number,
        menu,
        steps_left,
        arrival_s,
        arrival_s + slo_s,
        has_begun=degree > 0 or steps_left < NUM_STEPS,
        degree=degree,
        target=degree,
        ready_s=float(rng.uniform(0.0, menu.fastest_s)),
    )


def measure(policy: str, crowd: Crowd, *, num_groups: int, num_requests: int) -> list[float]:
    """Return milliseconds: median and 99th percentile of CPU time, median of wall time."""
    menus = menus_of(load_profile("flux-h100-a"), FLUX_CLASSES, num_gpus=NUM_GPUS)
    planner = planner_of(policy, menus)
    rng = np.random.default_rng(5)
    costs = []
    for _ in range(num_groups):
        group = draw_group(crowd, menus, num_requests, rng)
        with Stopwatch() as watch:
            planner(group)
        costs.append((1e3 * watch.cost.cpu_s, 1e3 * watch.cost.wall_s))
    cpu_ms, wall_ms = np.array(costs).T
    return [float(np.median(cpu_ms)), float(np.quantile(cpu_ms, 0.99)), float(np.median(wall_ms))]


def show_decisions(num_groups: int, num_requests: int) -> None:
    print("CPU ms p50, CPU ms p99, wall ms p50")
    for policy in POLICIES:
        for crowd in CROWDS:
            times = measure(policy, crowd, num_groups=num_groups, num_requests=num_requests)
            print(f"{policy:20} {crowd.name:28}", *(f"{one:7.3f}" for one in times))


def show_fleet(num_requests: int, num_groups: int) -> None:
    experiment = SpExperiment(num_arrivals=num_requests)
    menus, tasks = workload_of(experiment, FLEET_CELL, seed=1000)
    with Stopwatch() as watch:
        fleet = run_fleet(
            tasks,
            planner_of(OURS, menus),
            num_groups=num_groups,
            num_gpus=experiment.num_gpus,
            switch_s=experiment.switch_s,
        )
    print(
        f"{fleet.num_requests} requests in {tasks[-1].arrival_s:.0f} simulated s on "
        f"{num_groups} groups: {watch.cost.cpu_s:.1f} s of CPU, {watch.cost.wall_s:.1f} s of "
        f"wall; {fleet.num_decisions} decisions, {fleet.num_events} events, "
        f"{fleet.num_on_time / fleet.num_requests:.1%} on time (simulated)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--decisions", type=int, default=300, help="of each sort")
    parser.add_argument("--requests", type=int, default=64, help="of each decision's group")
    parser.add_argument("--fleet-requests", type=int, default=300_000)
    parser.add_argument("--fleet-groups", type=int, default=128)
    options = parser.parse_args(arguments)
    if options.only in (None, "decisions"):
        show_decisions(options.decisions, options.requests)
    if options.only in (None, "fleet"):
        show_fleet(options.fleet_requests, options.fleet_groups)


if __name__ == "__main__":
    main()
