"""The controller: replicas driven up and down under load, and a day of calls beside other policies.

Three parts: forced reshapes of a live service; the same trace live under the controller, under
no controller, and under DiffServe's policy; and that trace simulated, with more policies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.controller_amounts import amounts_of
from benchmarks.serving.controller_comparison import (
    OURS,
    RIVALS,
    Day,
    Live,
    num_slots,
    prepare,
    quality_of,
    row_of,
    run_live,
    violated,
)
from benchmarks.serving.controller_policies import Costs, costs_of
from benchmarks.serving.controller_reshapes import STARTS, Reshaped, reshape
from benchmarks.serving.controller_simulated import Run, simulate_all
from benchmarks.serving.controller_trace import (
    Answer,
    delivered,
    gap,
    over_time,
    rights,
    violations,
)
from benchmarks.settings import Report, Settings
from benchmarks.stats import summarise
from benchmarks.verdicts import Aim, at_most
from recipes.figures.scoring import Share

MOST_VIOLATIONS = 3.0
# a policy with more is no rival: who drops calls has time for good images
COMPARABLE_VIOLATIONS = 10.0
MOST_GAP = 3.0
MOST_RESHAPE_S = 12.0
MOST_CHANGES = 1.0
# of the answers, that may be read otherwise than the same image was beforehand
_MOST_OTHERWISE = 0.02
OVER_TIME = "over time, live"
_SPIN = (
    "import time\nend, n = time.perf_counter() + 1.0, 0\n"
    "while time.perf_counter() < end:\n    n += 1\nprint(n)"
)


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Measure all three parts."""
    amounts = amounts_of(settings)
    report(0.0, "effective cores")
    cores = effective_cores()
    reshaped = reshape(amounts, lambda part, what: report(0.4 * part, f"reshapes {what}"))
    day = prepare(amounts, lambda part, what: report(0.4 + 0.1 * part, what))
    live: dict[str, Live] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, rival) in enumerate(RIVALS.items()):
            report(0.5 + 0.45 * number / len(RIVALS), f"live: {name}")
            live[name] = run_live(rival, day, Path(folder), name)
    simulated = simulate_all(day, live, lambda part, what: report(0.95 + 0.05 * part, what))
    return section(reshaped, day, live, simulated, cores)


def effective_cores() -> float:
    """Return how many times the work of one process as many as there are cores do at once."""

    def work(count: int) -> int:
        processes = [
            subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE)
            for _ in range(count)
        ]
        return sum(int(one.communicate()[0]) for one in processes)

    alone = work(1)
    return round(work(num_cores()) / alone, 2)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def section(
    reshaped: Reshaped,
    day: Day,
    live: Mapping[str, Live],
    simulated: Mapping[str, Run],
    cores: float,
) -> dict[str, Any]:
    """Return the tables, aims and problems."""
    trace = day.trace
    answers = {name: one.answers for name, one in live.items()}
    aims = [
        *_reshape_aims(reshaped),
        *_quality_aims(answers, {name: one.answers for name, one in simulated.items()}),
        *_gap_aims(answers, simulated),
    ]
    return {
        "what": f"{cores:g} effective cores; {len(reshaped.reshapes)} reshapes under load; then "
        f"{len(trace.instants_s)} calls in {trace.duration_s:g} s, up to {trace.peak_per_s:.2f} a "
        f"second, where the heavy model makes {day.capacity_per_s:.2f} on all cores; deadline "
        f"{trace.slo_s:g} s; {num_slots()} replicas of models at most, one thread each",
        "tables": {
            "reshapes": list(_reshape_rows(reshaped)),
            "changes of replicas under oscillating demand": [
                {"dwell time": place + 1, "changes": count}
                for place, count in enumerate(reshaped.changes)
            ],
            "a day, live": [
                row_of(
                    name,
                    one.answers,
                    **{
                        "core-seconds": round(one.core_s),
                        "busy cores": round(sum(one.cores["cores_by_role"].values()), 2),
                        "of others": one.cores["cores_of_others"],
                    },
                )
                for name, one in live.items()
            ],
            "the same day, simulated": [
                row_of(name, one.answers, **{"core-seconds": round(one.core_s)})
                for name, one in simulated.items()
            ],
            "seconds that the simulated cells take for images, as learnt live": [
                _cost_row(name, costs_of(one.rounds)) for name, one in live.items()
            ],
            "simulated less live": list(_gap_rows(answers, simulated)),
            OVER_TIME: over_time(answers, trace.duration_s),
            "over time, simulated": over_time(
                {name: simulated[name].answers for name in live}, trace.duration_s
            ),
        },
        "aims": [one.as_dict() for one in aims],
        "notes": [f"{name}: {one.what}" for name, one in RIVALS.items()],
        "problems": [*reshaped.problems, *_otherwise(day, live), *_failures(live)],
        "cores": {name: one.cores for name, one in live.items()},
    }


def _cost_row(name: str, costs: Costs) -> dict[str, Any]:
    return {
        "policy": name,
        **{
            f"{pool.model}, batch of {option.batch}": round(option.seconds, 3)
            for pool in costs.fleet.pools
            for option in (pool.options[0], pool.options[-1])
        },
        **{f"{pool.model}, load": round(pool.load_s, 1) for pool in costs.fleet.pools},
        "replicas at most": costs.num_slots,
    }


def _reshape_rows(reshaped: Reshaped) -> Iterator[dict[str, Any]]:
    for kind in dict.fromkeys(one.kind for one in reshaped.reshapes):
        own = [one for one in reshaped.reshapes if one.kind == kind]
        took_s = [one.took_s for one in own if one.took_s is not None]
        planned_s = [one.planned_s - one.forced_s for one in own if one.planned_s is not None]
        yield {
            "reshape": kind,
            "count": len(own),
            "done": len(took_s),
            "until planned, s": summarise(planned_s).as_dict() if planned_s else None,
            "from plan to done, s": summarise(took_s).as_dict() if took_s else None,
        }
    yield {"reshape": "all", "count": len(reshaped.reshapes), "calls": reshaped.num_calls}


def _reshape_aims(reshaped: Reshaped) -> Iterator[Aim]:
    starts = [one for one in reshaped.reshapes if one.kind in STARTS]
    if took_s := [one.took_s for one in starts if one.took_s is not None]:
        found = summarise(took_s)
        yield at_most("from plan to replica, p50", MOST_RESHAPE_S, found.median, found.ci95, "s")
    changes = np.array(reshaped.changes, float)
    mean, spread = float(changes.mean()), 0.0
    if len(changes) > 1:
        spread = 1.96 * float(changes.std(ddof=1)) / len(changes) ** 0.5
    ends = (max(0.0, mean - spread), mean + spread)
    yield at_most("changes in a dwell time", MOST_CHANGES, mean, ends, "changes")


def _quality_aims(
    live: Mapping[str, Sequence[Answer]], simulated: Mapping[str, Sequence[Answer]]
) -> Iterator[Aim]:
    """Yield the aims for ours, live and then simulated, each beside its own kind."""
    for where, runs in (("live", live), ("simulated", simulated)):
        own = runs[OURS]
        share = Share(sum(map(int, violations(own))), len(own))
        low, high = (100 * end for end in share.interval)
        yield at_most(f"violations, {where}", MOST_VIOLATIONS, 100 * share.value, (low, high), "%")
        for name, others in runs.items():
            if name == OURS:
                continue
            more = gap(delivered(others), delivered(own))
            title = f"of calls right in time by {name} more than by ours, {where}"
            yield at_most(title, 0.0, more.value, (more.low, more.high), "points")
            if violated(others) <= COMPARABLE_VIOLATIONS:
                more = gap(rights(others), rights(own))
                title = f"all right by {name} more than by ours, {where}"
                yield at_most(title, 0.0, more.value, (more.low, more.high), "points")


def _gap_aims(live: Mapping[str, Sequence[Answer]], simulated: Mapping[str, Run]) -> Iterator[Aim]:
    for name, own in live.items():
        for title, figure in (("violations", violations), ("all right", rights)):
            found = gap(figure(simulated[name].answers), figure(own))
            yield at_most(
                f"simulated beside live, {title}: {name}",
                MOST_GAP,
                found.size,
                found.size_interval,
                "points",
            )


def _gap_rows(
    live: Mapping[str, Sequence[Answer]], simulated: Mapping[str, Run]
) -> Iterator[dict[str, Any]]:
    for name, own in live.items():
        other = simulated[name].answers
        yield {
            "policy": name,
            "violations, points": round(violated(other) - violated(own), 2),
            "all right, points": round(quality_of(other) - quality_of(own), 2),
        }


def _otherwise(day: Day, live: Mapping[str, Live]) -> Iterator[str]:
    """Yield whose images are not those that the models made of the same prompts beforehand."""
    for name, run in live.items():
        made = [
            one.is_right != day.known[prompt].is_right(one.stage)
            for one, prompt in zip(run.answers, day.trace.prompts, strict=True)
            if one.stage is not None and one.is_right is not None
        ]
        if sum(made) > _MOST_OTHERWISE * len(made):
            yield f"{name}: {sum(made)} of {len(made)} images are not those made beforehand"


def _failures(live: Mapping[str, Live]) -> Iterator[str]:
    for name, run in live.items():
        failed = sum(one.fate == "failed" for one in run.answers)
        if failed:
            yield f"{name}: {failed} calls failed"
