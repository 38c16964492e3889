"""What one decision of a sequence-parallel group costs, at 8 GPUs and 64 requests.

``python -m benchmarks.policies.sp_decisions`` prints a table: CPU milliseconds of the thread, and
of the wall clock, over random groups in which up to 8 GPUs run requests and the others wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.stopwatch import Stopwatch
from ray_cluster.policies.sp_types import DegreeMenu, GroupRequest, GroupView
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.sp_policies import planner_of
from ray_cluster.simulator.sp_workload import FLUX_CLASSES, menus_of

NUM_GPUS = 8
NUM_STEPS = 50
POLICIES = ("rounds/most", "rounds/large", "widest", "knapsack/5/grid", "static/8-8-8-8/edf")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=300, help="decisions of each sort")
    parser.add_argument("--requests", type=int, default=64, help="of each group")
    options = parser.parse_args()
    print("CPU ms p50, CPU ms p99, wall ms p50")
    for policy in POLICIES:
        for crowd in CROWDS:
            times = measure(policy, crowd, num_groups=options.groups, num_requests=options.requests)
            print(f"{policy:20} {crowd.name:28}", *(f"{one:7.3f}" for one in times))


if __name__ == "__main__":
    main()
