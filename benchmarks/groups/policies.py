"""A group's policies through HTTP, on ranks whose steps last as long as published ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty
from statistics import fmean

from benchmarks.figures import Figure, percentile
from benchmarks.groups import live
from benchmarks.groups.live import Ask, Found, Over, Ready, Served, Unit
from benchmarks.groups.published import (
    CLASSES,
    NUM_RANKS,
    NUM_STEPS,
    PROFILE,
    SCALE,
    SLO_SCALE,
    StepTimes,
    step_times,
)
from benchmarks.harness import Study
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.sequence_parallel.types import GroupView, Planner, RoundDecision
from ray_cluster.simulator.groups.experiment import run_tasks
from ray_cluster.simulator.groups.group import GroupTask
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.groups.workload import MixName, draw_count, size_mix
from ray_cluster.simulator.results import Mean, paired_difference

OURS, BEST = "rounds/large", "best static"
# a step here stands for five: rounds of one step are TetriServe's of five
_OTHERS = {one: one for one in ("fixed/1", "fixed/2", "fixed/4", "widest", "knapsack/1/grid")}
# best degrees by class and order, by the simulator on seeds 0 to 9 (tuned at 86cbe1f6)
_BEST_STATIC = {"uniform": "static/4-2-4-4/edf", "skewed": "static/2-4-4-4/edf"}
# of published seconds: twelve a minute for eight GPUs are six for four
_RATE_PER_MIN = 6.0
_SWITCH_S = 0.005
_MOST_REAL, _MOST_POINTS = 0.2, 5.0
# that a service may take from one answer to the next
_PATIENCE_S = 400.0


# seconds of a published image that one here lasts; services beside each other, each with ranks
_PACE, _SERVICES = 0.5, 5
_SEEDS = (100, 101, 102, 103, 104)


def measure(study: Study, mix: MixName) -> None:
    """Serve every workload under every policy, and simulate the same."""
    times, num = step_times(_PACE), study.pick(24, 4)
    seeds = study.pick(_SEEDS, _SEEDS[:1])
    study.found["what"] = (
        f"{mix}: {len(seeds)} workloads of {num} requests through HTTP, {NUM_RANKS} gloo ranks "
        f"with paced steps: an image of {NUM_STEPS} steps lasts {_PACE:g} times what {PROFILE} "
        f"has; deadlines {_PACE * SLO_SCALE:g} times TetriServe's; a client leaves at its deadline"
    )
    units = _units(mix, seeds, num)
    served, ready, real = list[Served](), list[Ready](), list[float]()
    with _services(units, times, study.pick(_SERVICES, 1)) as found:
        for one in found:
            match one:
                case Ready():
                    ready.append(one)
                case Over():
                    real += one.real
                case Served():
                    served.append(one)
                    study.say(len(served) / len(units), f"{mix}: {one.unit.name}")
    tail_s = {side: fmean(one.tail_s[side] for one in ready) for side in CLASSES}
    _compare(study, f"attainment, {mix}", served, times, tail_s, _PACE)
    study.at_most("99 % of real steps, of what they last", _MOST_REAL, percentile(real, 99), "")
    _note(study, times, tail_s, ready, real)
    study.found["served"] = [
        {"policy": one.unit.name, "seed": one.unit.seed, "seconds": one.seconds} for one in served
    ]


def _units(mix: MixName, seeds: Sequence[int], num_requests: int) -> list[Unit]:
    policies = {OURS: OURS, **_OTHERS, BEST: _BEST_STATIC[mix]}
    profile, units = load_profile(PROFILE), []
    for seed in seeds:
        rate_per_s = _RATE_PER_MIN / 60 / _PACE
        drawn = draw_count(size_mix(mix, profile), rate_per_s, num_requests, seed=seed, cv=1.0)
        asks = tuple(Ask(one.arrival_s, one.width_px // SCALE) for one in drawn)
        units += [Unit(name, policy, seed, asks) for name, policy in policies.items()]
    return units


@contextmanager
def _services(
    units: Sequence[Unit], times: StepTimes, num_services: int
) -> Iterator[Iterator[Found]]:
    """Services that share the units among them; yields what they find until all have ended."""
    context = get_context("spawn")
    waiting: Queue[Unit | None] = context.Queue()
    found: Queue[Found] = context.Queue()
    for one in (*units, *[None] * num_services):
        waiting.put(one)
    processes = [
        context.Process(target=live.run, args=(waiting, found, times, _PACE))
        for _ in range(num_services)
    ]
    for process in processes:
        process.start()
    try:
        yield _until_over(processes, found)
    finally:
        for process in processes:
            # one that has failed leaves the others with all that it had to do
            process.join(30)
            process.terminate()


def _until_over(processes: Sequence[BaseProcess], found: Queue[Found]) -> Iterator[Found]:
    num_over = 0
    while num_over < len(processes):
        try:
            one = found.get(timeout=_PATIENCE_S)
        except Empty:
            raise RuntimeError("a service with paced ranks hangs, or has failed") from None
        num_over += isinstance(one, Over)
        yield one


def _note(
    study: Study,
    times: StepTimes,
    tail_s: Mapping[int, float],
    ready: Sequence[Ready],
    real: Sequence[float],
) -> None:
    ratios = [ratio for one in ready for ratio in one.ratios.values()]
    over, above = (sum(one > most for one in real) / len(real) for most in (1.0, _MOST_REAL))
    study.note(
        f"step times differ by {100 * max(times.errors.values()):.1f} % at most from the profile's "
        f"rows; once warm, the service takes them for {min(ratios):.2f} to {max(ratios):.2f} of "
        "what they are to last"
    )
    study.note(
        f"real seconds of a step over those that it lasts: median {percentile(real, 50):.3f}; "
        f"above a fifth {100 * above:.2f} %, over {100 * over:.3f} % of {len(real)}"
    )
    alone = ", ".join(f"{side} px {seconds:.3f} s" for side, seconds in tail_s.items())
    study.note(f"an image alone takes beside its steps: {alone}")


def _compare(
    study: Study,
    table: str,
    served: Sequence[Served],
    times: StepTimes,
    tail_s: Mapping[int, float],
    pace: float,
) -> None:
    """Add a row for each policy, and what was wanted of it."""
    ordered = sorted(served, key=lambda one: one.unit.seed)
    ours = [one.percent for one in ordered if one.unit.name == OURS]
    for name in dict.fromkeys(one.unit.name for one in ordered):
        own = [one for one in ordered if one.unit.name == name]
        live_percent = [one.percent for one in own]
        simulated = [_simulated(one.unit, times, tail_s, pace) for one in own]
        to_ours = _figure(paired_difference(ours, live_percent))
        to_simulated = _figure(paired_difference(live_percent, simulated))
        steps = [sum(one.steps_by_degree.get(degree, 0) for one in own) for degree in times.terms]
        columns = {
            "policy": name,
            "stands for": own[0].unit.policy,
            "live %": fmean(live_percent),
            "simulated %": fmean(simulated),
            "ours over it": to_ours,
            "live over simulated": to_simulated,
            "steps by degree": "/".join(map(str, steps)),
        }
        study.row(table, **columns)
        if name != OURS:
            # its whole interval should not lie below
            study.at_least(f"ours over {name}", 0.0, to_ours["high"], "points in the interval")
        what = f"{name}, live over simulated"
        study.at_least(what, -_MOST_POINTS, to_simulated, "points")


def _simulated(unit: Unit, times: StepTimes, tail_s: Mapping[int, float], pace: float) -> float:
    """Return the percentage on time of a unit on a virtual clock, with the same menu."""
    menus = {f"{side}x{side}": times.menu(side, tail_s[side]) for side in CLASSES}
    steps = tuple(map(float, range(NUM_STEPS + 1)))
    tasks = []
    for number, one in enumerate(unit.asks):
        menu = menus[f"{one.side_px}x{one.side_px}"]
        deadline_s = one.arrival_s + pace * CLASSES[one.side_px]
        tasks.append(GroupTask(number, menu, one.arrival_s, deadline_s, menu.step_s, steps))
    planner = planner_of(unit.policy, menus)
    if unit.policy.startswith("fixed"):
        planner = partial(_leaving, planner)
    run = run_tasks(tasks, planner, num_gpus=NUM_RANKS, switch_s=_SWITCH_S)
    return 100 * fmean(one.is_on_time for one in run.outcomes)


def _leaving(planner: Planner, view: GroupView) -> RoundDecision:
    """Decide as a policy that drops nothing, for clients that leave at their deadlines."""
    found = planner(view)
    gone = tuple(one.request_id for one in view.requests if one.deadline_s <= view.now_s)
    ends = [one.deadline_s for one in view.requests if one.deadline_s > view.now_s]
    return replace(found, dropped=gone, look_again_s=min(ends, default=found.look_again_s))


def _figure(one: Mean) -> Figure:
    width = 0.0 if math.isnan(one.half_width) else one.half_width
    return {"value": one.value, "low": one.value - width, "high": one.value + width}
