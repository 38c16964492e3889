"""The same day of calls on a simulated cell: the live loop and dispatch core on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.serving.controller_calls import Known
from benchmarks.serving.controller_comparison import PERIOD_S, Day, Live
from benchmarks.serving.controller_policies import Costs, first_replicas, planners
from benchmarks.serving.controller_trace import Answer
from ray_cluster.control.cell_fleet import HUNDRED
from ray_cluster.control.loop import ControlLoop
from ray_cluster.policies.baselines.fixed_cascades import FixedPlanner
from ray_cluster.policies.planning.plan import Plan, planned_settings_of
from ray_cluster.policies.planning.planner import Planner
from ray_cluster.simulator.cell.cell import Fate
from ray_cluster.simulator.control.cluster import STEPS, SimulatedCluster, whole_image
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.workload import Arrival

Say = Callable[[float, str], None]

_NOISE_CV = 0.05
_SEED = 3


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated run.

    Attributes:
        core_s: for which replicas reserved CPUs, loading or serving.
    """

    answers: Sequence[Answer]
    core_s: float


def simulate(costs: Costs, planner: Planner[Any], day: Day) -> Run:
    """Simulate a day, from one replica of each model."""
    events, fleet, trace = EventQueue(), costs.fleet, day.trace
    [device], [service] = fleet.devices, fleet.services
    cluster = SimulatedCluster(
        events,
        costs.as_it_ran,
        {device.device: costs.supply},
        np.random.default_rng(_SEED),
        noise_cv=_NOISE_CV,
        dwell_s=costs.seen.limits.dwell_s,
    )
    initial = planner.fixed if isinstance(planner, FixedPlanner) else Plan(first_replicas(fleet))
    cluster.apply(planned_settings_of(initial))
    for pool in initial.pools:
        cluster.scale(pool.pool, pool.num_replicas)
    begin_s = 3 * max(one.load_s for one in fleet.pools)
    events.run(begin_s)
    before_h = cluster.gpu_hours
    requests = _requests(day, service.name, begin_s)
    loop = ControlLoop(planner, cluster, events, applied=initial)
    loop.start(events, PERIOD_S)
    arrivals_s = [one.arrival_s for one in requests]
    events.at_each(arrivals_s, lambda number: cluster.offer(requests[number]))
    events.run(begin_s + trace.duration_s)
    core_s = 3600 * (cluster.gpu_hours - before_h) / HUNDRED
    events.run(begin_s + trace.duration_s + 2 * trace.slo_s)
    loop.stop()
    cluster.cell.run_out()
    by_arrival = {one.arrival.arrival_s: one for one in cluster.fates}
    return Run(
        [
            _answer(at_s, by_arrival.get(request.arrival_s), day.known[prompt])
            for at_s, request, prompt in zip(trace.instants_s, requests, trace.prompts, strict=True)
        ],
        core_s,
    )


def _requests(day: Day, service: str, begin_s: float) -> list[Arrival]:
    trace = day.trace
    coins = np.random.default_rng([_SEED, 1]).random(len(trace.instants_s))
    return [
        whole_image(
            *(begin_s + at_s, service, trace.slo_s),
            num_steps=STEPS,
            confidence=day.known[prompt].confidence,
            coin=coin,
        )
        for at_s, prompt, coin in zip(trace.instants_s, trace.prompts, coins.tolist(), strict=True)
    ]


def _answer(at_s: float, fate: Fate | None, known: Known) -> Answer:
    """Return what became of a call; one that has not ended is late."""
    if fate is None or fate.stage is None:
        return Answer(at_s, "late")
    stage: Literal["light", "heavy"] = "heavy" if fate.stage == "heavy" else "light"
    return Answer(at_s, "in time" if fate.is_met else "late", stage, known.is_right(stage))


def simulate_all(day: Day, live: Mapping[str, Live], say: Say) -> dict[str, Run]:
    """Simulate every policy."""
    found: dict[str, Run] = {}
    chosen = list(planners(live, day.trace.peak_per_s))
    for number, (name, costs, planner) in enumerate(chosen):
        say(number / len(chosen), f"simulated: {name}")
        found[name] = simulate(costs, planner, day)
    return found
