"""What a round's decision costs a sequence-parallel group.

Timed over random groups in which up to all GPUs run some requests and the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.policies.costs.samples import DecisionCost, Samples
from benchmarks.policies.costs.settings import GROUP_GPUS, CostSettings
from benchmarks.settings import Report
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, GroupRequest, GroupView
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.groups.workload import FLUX_CLASSES, menus_of

AIM_MS = 1.0
# requests, of a group of GROUP_GPUS, at which it holds
_AIM_AT = 64
OURS = ("rounds/most", "rounds/large")
POLICIES = (*OURS, "widest", "knapsack/5/grid", "static/8-8-8-8/edf")
_NUM_STEPS = 50
_SEED = 5


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
    Crowd("all sizes, none given up", (256, 512, 1024, 2048), 30.0),
)


def measure_rounds(settings: CostSettings, report: Report) -> Iterator[DecisionCost]:
    """Time our policies on groups of every size, and others on the largest ones."""
    largest = max(settings.crowds)
    cases = [
        (policy, crowd, gpus, requests)
        for gpus, requests in settings.crowds
        for policy in (POLICIES if (gpus, requests) == largest else OURS)
        for crowd in CROWDS
    ]
    for place, (policy, crowd, gpus, requests) in enumerate(cases):
        report(place / len(cases), f"{policy}, {requests} requests on {gpus} GPUs")
        samples = Samples()
        menus = menus_of(load_profile("flux-h100-a"), num_gpus=gpus)
        planner = planner_of(policy, menus)
        rng = np.random.default_rng(_SEED)
        for _ in range(settings.rounds):
            group = draw_group(crowd, menus, requests, rng, num_gpus=gpus)
            samples.timed(policy, partial(planner, group))
        yield samples.row(
            policy,
            gpus=gpus,
            load=f"{requests} requests: {crowd.name}",
            num_requests=requests,
            aim_ms=AIM_MS if policy in OURS and (gpus, requests) == (GROUP_GPUS, _AIM_AT) else None,
        )


def draw_group(
    crowd: Crowd,
    menus: Mapping[str, DegreeMenu],
    count: int,
    rng: np.random.Generator,
    *,
    num_gpus: int,
) -> GroupView:
    """Return a group of so many requests at random points of their lives."""
    classes = [one for one in FLUX_CLASSES if one.side_px in crowd.sides_px]
    free, requests = num_gpus, []
    for number in range(count):
        one = classes[int(rng.integers(len(classes)))]
        degree = int(min(rng.choice([1, 2, 4, 8]), 2 ** (free.bit_length() - 1))) if free else 0
        free -= degree
        requests.append(
            _draw_request(number, menus[str(one.side_px)], crowd.scale * one.slo_s, degree, rng)
        )
    return GroupView(num_gpus, 0.0, tuple(requests), switch_s=0.01)


def _draw_request(
    number: int, menu: DegreeMenu, slo_s: float, degree: int, rng: np.random.Generator
) -> GroupRequest:
    arrival_s = -float(rng.uniform(0.0, slo_s / 2))
    steps_left = int(rng.integers(1, _NUM_STEPS + 1))
    return GroupRequest(
        number,
        menu,
        steps_left,
        arrival_s,
        arrival_s + slo_s,
        has_begun=degree > 0 or steps_left < _NUM_STEPS,
        degree=degree,
        target=degree,
        ready_s=float(rng.uniform(0.0, menu.fastest_s)),
    )
