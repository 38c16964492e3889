"""The same day of calls under the controller, under no controller, and under DiffServe's policy.

One service after the other, on the same cores, one thread a replica. A first one tells what each
model makes of each prompt, and what the machine can do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving.controller_amounts import Amounts
from benchmarks.serving.controller_calls import (
    Known,
    answers_of,
    heavy_capacity,
    idle_route_s,
    is_up,
    learn,
    mixed_prompts,
    send,
)
from benchmarks.serving.controller_service import (
    HEAVY,
    ControlledContender,
    Service,
    controlled,
    until,
    watching,
)
from benchmarks.serving.controller_trace import (
    Answer,
    Trace,
    delivered,
    heavies,
    percent,
    rights,
    squeezed_day,
    violations,
)
from benchmarks.serving.controller_watch import (
    DIFFSERVE,
    NONE,
    Round,
    read_rounds,
    replicas_within,
)
from benchmarks.serving.processes import CpuMeter
from ray_cluster.control.cell_fleet import HUNDRED, share_of
from ray_cluster.quality.suite import SuitePrompt
from recipes.figures.scoring import Share

OURS, STATIC = "ours", "static"
PERIOD_S = 2.0
DWELL_S = 15.0
# of what the heavy model can make on all cores
_HIGH, _LOW = 1.2, 0.15
# of the deadline, in deferred images of an idle service
_SLACK = 4.0
_NUM_ROUTES = 10
# hundredths of a CPU that replicas of the models, and the discriminator, reserve by cascade.yaml
_SHARES, _JUDGE = (50, 100), 25

# planners may defer whatever they find worth it
_UNBOUNDED: Mapping[str, Any] = {"threshold": 1.0}
_CONTROL: Mapping[str, Any] = {"period_s": PERIOD_S, "dwell_s": DWELL_S}


@dataclass(frozen=True, slots=True)
class Rival:
    """A way to run the cascade.

    Attributes:
        cascade: what differs from the settings of ``configs/cascade.yaml``.
        control: of the service's controller; None without one.
        policy: of the watcher; see ``benchmarks.serving.controller_watch``.
    """

    what: str
    cascade: Mapping[str, Any] = field(default_factory=dict)
    control: Mapping[str, Any] | None = None
    policy: str = NONE


RIVALS: Mapping[str, Rival] = {
    STATIC: Rival("one replica of each model, and the threshold of the settings"),
    OURS: Rival("the controller plans replicas, caps and threshold", _UNBOUNDED, _CONTROL),
    # as published, no request has a threshold of its own
    DIFFSERVE: Rival(
        "DiffServe's policy plans them, in the same loop; the controller is paused",
        {**_UNBOUNDED, "reserve_s": None},
        _CONTROL,
        DIFFSERVE,
    ),
}


@dataclass(frozen=True, slots=True)
class Day:
    """What all of them get.

    Attributes:
        capacity_per_s: images that heavy replicas on all cores make in a second.
        route_s: seconds of a deferred image of an idle service.
    """

    trace: Trace
    prompts: Sequence[SuitePrompt]
    known: Sequence[Known]
    capacity_per_s: float
    route_s: float


@dataclass(frozen=True, slots=True)
class Live:
    """One live run.

    Attributes:
        rounds: of the watcher, while the trace ran.
        begin_s: Unix time of the trace's beginning.
        cores: that were busy meanwhile, by role; and those of processes outside the service.
    """

    answers: Sequence[Answer]
    rounds: Sequence[Round]
    begin_s: float
    duration_s: float
    cores: Mapping[str, Any]

    @property
    def core_s(self) -> float:
        """Seconds for which replicas of both models were to reserve CPUs, loading or serving."""
        return core_seconds(self.rounds, self.begin_s, self.begin_s + self.duration_s)


def num_slots() -> int:
    """Return how many replicas of models there are CPUs for beside the discriminator."""
    return replicas_within(100 * max(2, os.cpu_count() or 2) - _JUDGE, _SHARES)


def prepare(amounts: Amounts, say: Callable[[float, str], None]) -> Day:
    """Learn what both models make of the prompts, and what the machine can do."""
    prompts = mixed_prompts(amounts.prompts)
    contender = ControlledContender(
        what="whatever can be is deferred",
        cascade={**_UNBOUNDED, "reserve_s": None},
        pools={HEAVY: {"replicas": num_slots() - 1}},
    )
    say(0.0, "a service to learn from")
    with controlled(contender) as service:
        _await(lambda: is_up(service), "the models answer")
        _await(
            lambda: len(service.live()[HEAVY]) == num_slots() - 1,
            "all heavy replicas are there",
        )
        say(0.3, f"{len(prompts)} prompts by both models")
        known = learn(service, prompts)
        say(0.7, "capacity")
        route_s = idle_route_s(service, prompts, _NUM_ROUTES)
        per_s = heavy_capacity(service, prompts, amounts.capacity_s)
    trace = squeezed_day(
        _LOW * per_s,
        _HIGH * per_s,
        amounts.trace_s,
        slo_s=round(_SLACK * route_s, 2),
        num_prompts=len(prompts),
    )
    return Day(trace, prompts, known, per_s, route_s)


def run_live(rival: Rival, day: Day, folder: Path, name: str) -> Live:
    """Send the day's calls to a service of its own."""
    contender = ControlledContender(
        what=rival.what,
        cascade=rival.cascade,
        control=rival.control,
        default_slo_s=day.trace.slo_s,
    )
    out = folder / f"{name}.jsonl"
    with controlled(contender) as service:
        _await(lambda: is_up(service), "the models answer")
        if rival.control is not None:
            _await(lambda: _plans_cascade(service), "the cascade is planned")
        if rival.policy != NONE:
            service.pause()
        with watching(out, policy=rival.policy, period_s=PERIOD_S):
            meter, begin_s = CpuMeter(), time.time()
            replies = send(service, day.trace, day.prompts)
            cores = meter.read(0.0)
    end_s = begin_s + day.trace.duration_s
    rounds = [one for one in read_rounds(out) if begin_s - PERIOD_S <= one.at_s <= end_s]
    answers = answers_of(day.trace, day.prompts, replies)
    return Live(answers, rounds, begin_s, day.trace.duration_s, cores)


def row_of(name: str, answers: Sequence[Answer], **others: Any) -> dict[str, Any]:
    """Return the figures of a run."""
    fates = [one.fate for one in answers]
    right = [one.is_right for one in answers if one.is_right is not None]
    return {
        "policy": name,
        "calls": len(answers),
        "violations, %": str(Share(sum(map(int, violations(answers))), len(answers))),
        "late": fates.count("late"),
        "refused": fates.count("refused"),
        "failed": fates.count("failed"),
        "all right, %": str(Share(sum(right), len(right))),
        "of calls right in time, %": str(Share(round(sum(delivered(answers))), len(answers))),
        "heavy, %": round(percent(heavies(answers)), 1),
        **others,
    }


def quality_of(answers: Sequence[Answer]) -> float:
    """Return the percentage of the answers that are all right."""
    return percent(rights(answers))


def violated(answers: Sequence[Answer]) -> float:
    """Return the percentage of the calls without an image in time."""
    return percent(violations(answers))


def core_seconds(rounds: Sequence[Round], begin_s: float, end_s: float) -> float:
    """Return what models' replicas reserve between two instants; a round counts until the next."""
    total = 0.0
    instants = [*(one.at_s for one in rounds), end_s]
    instants[0] = min(instants[0], begin_s)
    for one, (from_s, to_s) in zip(rounds, pairwise(instants), strict=True):
        shares = (
            one.targets.get(pool.pool, 0) * share_of(pool)
            for pool in one.seen.pools
            if pool.kind == "denoise"
        )
        total += sum(shares) / HUNDRED * max(0.0, min(to_s, end_s) - max(from_s, begin_s))
    return total


def _plans_cascade(service: Service) -> bool:
    latest = service.plan()["latest"]
    return latest is not None and bool(latest["cascades"])


def _await(condition: Callable[[], bool], what: str) -> None:
    if not until(condition):
        raise TimeoutError(f"waited in vain until {what}")
