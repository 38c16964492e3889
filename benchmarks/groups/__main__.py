"""Measures a group's policies through HTTP: ``python -m benchmarks.groups``; see
benchmarks/README.md."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from statistics import fmean
from typing import Any

# before torch is imported: processes share two cores
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.groups import live
from benchmarks.groups.live import Ask, Over, Ready, Served, Unit
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
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.report import Section
from benchmarks.sections import run_sections
from benchmarks.settings import Report
from benchmarks.stats import percentile
from benchmarks.verdicts import Aim, at_least, at_most, may_be_at_least
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


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How much is measured.

    Attributes:
        pace: seconds of a published image that one here lasts.
        services: beside each other, each with ranks of its own.
        requests: of a workload.
    """

    pace: float = 0.5
    services: int = 5
    seeds: tuple[int, ...] = (100, 101, 102, 103, 104)
    requests: int = 24


_QUICK = GroupSettings(services=1, seeds=(100,), requests=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results; return the exit status."""
    mixes: tuple[MixName, ...] = ("uniform", "skewed")
    sections: dict[str, tuple[Callable[[GroupSettings, Report], Section], float]] = {
        one: (partial(_measure, one), 1200.0) for one in mixes
    }
    return run_sections("groups", __doc__, arguments, sections, _settings, _plot)


def _settings(is_quick: bool) -> GroupSettings:
    return _QUICK if is_quick else GroupSettings()


def _measure(mix: MixName, settings: GroupSettings, report: Report) -> Section:
    """Serve every workload under every policy, and simulate the same."""
    times = step_times(settings.pace)
    units = _units(mix, settings)
    served, ready, real = list[Served](), list[Ready](), list[float]()
    with _services(units, times, settings) as found:
        for one in found:
            match one:
                case Ready():
                    ready.append(one)
                case Over():
                    real += one.real
                case Served():
                    served.append(one)
                    report(len(served) / len(units), f"{mix}: {one.unit.name}")
    tail_s = {side: fmean(one.tail_s[side] for one in ready) for side in CLASSES}
    rows, aims = _compared(served, times, tail_s, settings.pace)
    share = percentile(real, 99)
    what = "99 % of real steps, of what they last"
    aims.append(at_most(what, _MOST_REAL, share, (share,) * 2, ""))
    return {
        "what": f"{mix}: {len(settings.seeds)} workloads of {settings.requests} requests through "
        f"HTTP, {NUM_RANKS} gloo ranks with paced steps: an image of {NUM_STEPS} steps lasts "
        f"{settings.pace:g} times what {PROFILE} has; deadlines {settings.pace * SLO_SCALE:g} "
        "times TetriServe's; a client leaves at its deadline",
        "tables": {f"attainment, {mix}": rows},
        "notes": _notes(times, tail_s, ready, real),
        "aims": [aim.as_dict() for aim in aims],
        "served": [
            {"policy": one.unit.name, "seed": one.unit.seed, "seconds": one.seconds}
            for one in served
        ],
    }


def _units(mix: MixName, settings: GroupSettings) -> list[Unit]:
    policies = {OURS: OURS, **_OTHERS, BEST: _BEST_STATIC[mix]}
    rate_per_s = _RATE_PER_MIN / 60 / settings.pace
    profile, units = load_profile(PROFILE), []
    for seed in settings.seeds:
        drawn = draw_count(size_mix(mix, profile), rate_per_s, settings.requests, seed=seed, cv=1.0)
        asks = tuple(Ask(one.arrival_s, one.width_px // SCALE) for one in drawn)
        units += [Unit(name, policy, seed, asks) for name, policy in policies.items()]
    return units


@contextmanager
def _services(
    units: Sequence[Unit], times: StepTimes, settings: GroupSettings
) -> Iterator[Iterator[Ready | Served | Over]]:
    """Services that share the units among them; yields what they find until all have ended."""
    context = get_context("spawn")
    waiting: Queue[Unit | None] = context.Queue()
    found: Queue[Ready | Served | Over] = context.Queue()
    for one in (*units, *[None] * settings.services):
        waiting.put(one)
    processes = [
        context.Process(target=live.run, args=(waiting, found, times, settings.pace))
        for _ in range(settings.services)
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


def _until_over(
    processes: Sequence[BaseProcess], found: Queue[Ready | Served | Over]
) -> Iterator[Ready | Served | Over]:
    num_over = 0
    while num_over < len(processes):
        try:
            one = found.get(timeout=_PATIENCE_S)
        except Empty:
            raise RuntimeError("a service with paced ranks hangs, or has failed") from None
        num_over += isinstance(one, Over)
        yield one


def _notes(
    times: StepTimes, tail_s: Mapping[int, float], ready: Sequence[Ready], real: Sequence[float]
) -> list[str]:
    ratios = [ratio for one in ready for ratio in one.ratios.values()]
    over, above = (sum(one > most for one in real) / len(real) for most in (1.0, _MOST_REAL))
    alone = ", ".join(f"{side} px {seconds:.3f} s" for side, seconds in tail_s.items())
    return [
        (
            f"step times differ by {100 * max(times.errors.values()):.1f} % at most from the "
            f"profile's rows; once warm, the service takes them for {min(ratios):.2f} to "
            f"{max(ratios):.2f} of what they are to last"
        ),
        (
            f"real seconds of a step over those that it lasts: median {percentile(real, 50):.3f}, "
            f"99th percentile {percentile(real, 99):.3f}; above a fifth {100 * above:.2f} %, over "
            f"{100 * over:.3f} % of {len(real)}"
        ),
        f"an image alone takes beside its steps: {alone}",
    ]


def _compared(
    served: Sequence[Served], times: StepTimes, tail_s: Mapping[int, float], pace: float
) -> tuple[list[dict[str, Any]], list[Aim]]:
    """Return a row for each policy, and what was wanted of it."""
    ordered, rows, aims = sorted(served, key=lambda one: one.unit.seed), [], []
    ours = [one.percent for one in ordered if one.unit.name == OURS]
    for name in dict.fromkeys(one.unit.name for one in ordered):
        own = [one for one in ordered if one.unit.name == name]
        live_percent = [one.percent for one in own]
        simulated = [_simulated(one.unit, times, tail_s, pace) for one in own]
        to_ours = paired_difference(ours, live_percent)
        to_simulated = paired_difference(live_percent, simulated)
        steps = [sum(one.steps_by_degree.get(degree, 0) for one in own) for degree in times.terms]
        rows.append(
            {
                "policy": name,
                "stands for": own[0].unit.policy,
                "live %": fmean(live_percent),
                "simulated %": fmean(simulated),
                "ours over it": to_ours.as_text(1),
                "live over simulated": to_simulated.as_text(1),
                "steps by degree": "/".join(map(str, steps)),
            }
        )
        if name != OURS:
            interval = _interval(to_ours)
            aims.append(
                may_be_at_least(f"ours over {name}", 0.0, to_ours.value, interval, "points")
            )
        what, interval = f"{name}, live over simulated", _interval(to_simulated)
        aims.append(at_least(what, -_MOST_POINTS, to_simulated.value, interval, "points"))
    return rows, aims


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


def _interval(one: Mean) -> tuple[float, float]:
    width = 0.0 if math.isnan(one.half_width) else one.half_width
    return one.value - width, one.value + width


def _plot(result: dict[str, Any], path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for ax, (mix, section) in zip(axes, result["sections"].items(), strict=True):
        [rows] = section["tables"].values()
        for shift, column in ((-0.2, "live %"), (0.2, "simulated %")):
            places = [place + shift for place in range(len(rows))]
            ax.bar(places, [row[column] for row in rows], 0.4, label=column)
        ax.set_xticks(range(len(rows)), [row["policy"] for row in rows], rotation=30)
        ax.set(title=mix, ylabel="requests on time, %", ylim=(0, 100))
        ax.legend(fontsize=8)
    save_figure(figure, result, path)


if __name__ == "__main__":
    raise SystemExit(main())
