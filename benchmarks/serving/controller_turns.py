"""The same day of calls under the controller and under none, in turns that cancel a slow drift.

Machines become slower and faster within minutes. So the controller runs first and last, and the
fixed threshold twice in between; each pair of neighbours is a comparison of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving.controller import MOST_VIOLATIONS, effective_cores
from benchmarks.serving.controller_amounts import amounts_of
from benchmarks.serving.controller_comparison import (
    OURS,
    RIVALS,
    STATIC,
    Day,
    Live,
    prepare,
    row_of,
    run_live,
)
from benchmarks.serving.controller_policies import costs_of
from benchmarks.serving.controller_service import HEAVY
from benchmarks.serving.controller_trace import Answer, delivered, gap, over_time, violations
from benchmarks.settings import Report, Settings
from benchmarks.verdicts import Aim, at_most
from recipes.figures.scoring import Share

_SHOWN = ("of calls right in time, %", "heavy, %")
ORDER = (OURS, STATIC, STATIC, OURS)


class Turn(NamedTuple):
    """One live run."""

    policy: str
    live: Live


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Measure all turns."""
    amounts = amounts_of(settings)
    report(0.0, "effective cores")
    cores = [effective_cores()]
    day = prepare(amounts, lambda part, what: report(0.2 * part, what))
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        for number, policy in enumerate(ORDER):
            report(0.2 + 0.8 * number / len(ORDER), f"live: {policy}")
            live = run_live(RIVALS[policy], day, Path(folder), f"{policy}-{number}")
            turns.append(Turn(policy, live))
    return section(day, turns, [*cores, effective_cores()])


def section(day: Day, turns: Sequence[Turn], cores: Sequence[float]) -> dict[str, Any]:
    """Return the tables and aims.

    Args:
        cores: effective ones before and after.
    """
    trace = day.trace
    by_turn = {f"{one.policy}, turn {number}": one.live for number, one in enumerate(turns, 1)}
    answers = {name: one.answers for name, one in by_turn.items()}
    return {
        "what": f"{cores[0]:g} effective cores before, {cores[-1]:g} after; "
        f"{len(trace.instants_s)} calls in {trace.duration_s:g} s for each turn, up to "
        f"{trace.peak_per_s:.2f} a second, where the heavy model makes {day.capacity_per_s:.2f} on "
        f"all cores; deadline {trace.slo_s:g} s",
        "tables": {
            "turns": [
                row_of(
                    name,
                    one.answers,
                    **{
                        "heavy image alone, s": round(costs_of(one.rounds).image_s(HEAVY), 3),
                        "busy cores": round(sum(one.cores["cores_by_role"].values()), 2),
                        "of others": one.cores["cores_of_others"],
                    },
                )
                for name, one in by_turn.items()
            ],
            "over time": over_time(answers, trace.duration_s, _SHOWN),
        },
        "aims": [one.as_dict() for one in _aims(turns)],
        "notes": [f"{name}: {RIVALS[name].what}" for name in dict.fromkeys(ORDER)],
        "cores": {name: one.cores for name, one in by_turn.items()},
    }


def _aims(turns: Sequence[Turn]) -> Iterator[Aim]:
    own, others = (_of_all(turns, policy) for policy in (OURS, STATIC))
    share = Share(sum(map(int, violations(own))), len(own))
    low, high = (100 * end for end in share.interval)
    yield at_most("violations", MOST_VIOLATIONS, 100 * share.value, (low, high), "%")
    more = gap(delivered(others), delivered(own))
    title = f"of calls right in time by {STATIC} more than by ours"
    yield at_most(title, 0.0, more.value, (more.low, more.high), "points")


def _of_all(turns: Sequence[Turn], policy: str) -> list[Answer]:
    """Return a policy's answers in all of its turns, so that those of the same calls are paired."""
    return list(chain.from_iterable(one.live.answers for one in turns if one.policy == policy))
