"""A day of calls for a cascade under the controller and under none, in turns that cancel a drift.

Machines become slower and faster within minutes. So the controller runs first and last, and the
fixed threshold twice in between; each pair of neighbours is a comparison of its own. Each turn is a
service of its own, on the same cores, one thread a replica; a first one tells how fast the machine
is.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import numpy as np
import yaml

from benchmarks.figures import Figure, percentile, resamples
from benchmarks.harness import Plot, Study
from benchmarks.serving.cascade import (
    FILE,
    HEAVY,
    LIGHT,
    Made,
    mixed_prompts,
    post,
    right_images,
)
from benchmarks.serving.processes import CpuMeter
from benchmarks.serving.services import (
    OPEN_LIMITS,
    TIMEOUT_S,
    Config,
    Contender,
    Running,
    free_port,
    open_loop,
    rate_per_s,
    running,
    samples,
    until,
)
from ray_cluster.quality.suite import SuitePrompt
from ray_cluster.simulator.arrivals import daily_rate, draw_arrivals
from recipes.figures.scoring import Share

OURS, STATIC = "ours", "static"
ORDER = (OURS, STATIC, STATIC, OURS)
MOST_VIOLATIONS = 3.0
PERIOD_S = 2.0
START_S = 180.0
_FIRST_DASHBOARD = 19000
_DWELL_S = 15.0
_SEED, _CV, _BIN_S = 11, 1.2, 10.0
# of what the heavy model can make on all cores
_HIGH, _LOW = 1.2, 0.15
# of the deadline, in deferred images of an idle service
_SLACK = 4.0
_NUM_ROUTES, _CLIENTS = 10, 8
# after its deadline, in which a caller hangs up: what is late is of no use to it
_PATIENCE_S = 0.1
# hundredths of a CPU that replicas of the models, and the discriminator, reserve by cascade.yaml
_SHARES, _JUDGE = (50, 100), 25
_SPIN = (
    "import time\nend, n = time.perf_counter() + 1.0, 0\n"
    "while time.perf_counter() < end:\n    n += 1\nprint(n)"
)


@dataclass(frozen=True)
class Controlled:
    """How the service of ``configs/cascade.yaml`` is changed.

    Attributes:
        control: the section of the controller; None without one.
        cascade: what differs from the file's cascade; None leaves cascade and discriminator out.
        pools: what differs from the file's pools, by name.
        default_slo_s: deadline that plans are made for.
    """

    control: Mapping[str, Any] | None = None
    cascade: Mapping[str, Any] | None = field(default_factory=dict)
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default_slo_s: float = 60.0

    def of(self, usual: Config) -> Config:
        """Return the service's configuration."""
        given = yaml.safe_load(FILE.read_text(encoding="utf-8"))
        port = free_port(_FIRST_DASHBOARD)
        own = usual | {
            "ray": {**usual["ray"], "include_dashboard": True, "dashboard_port": port},
            "pools": [{**one, **self.pools.get(one["name"], {})} for one in given["pools"]],
            "loras": {"num_stores": 0},
            "limits": OPEN_LIMITS,
            "dispatch": {"default_slo_s": self.default_slo_s},
        }
        if self.cascade is not None:
            [cascade] = given["cascades"]
            own["discriminators"] = given["discriminators"]
            own["cascades"] = [{**cascade, **self.cascade}]
        if self.control is not None:
            own["control"] = {"enabled": True, **self.control}
        return own


# the controller may defer whatever it finds worth it
_UNBOUNDED: Mapping[str, Any] = {"threshold": 1.0}
POLICIES = {
    STATIC: Controlled(),
    OURS: Controlled({"period_s": PERIOD_S, "dwell_s": _DWELL_S}, _UNBOUNDED),
}


class Day(NamedTuple):
    """The calls of a day, for one image each.

    Attributes:
        instants_s: of arrivals, rising.
        prompts: of each call.
        peak_per_s: the highest rate.
        slo_s: deadline of each call, from its arrival.
    """

    instants_s: tuple[float, ...]
    prompts: tuple[SuitePrompt, ...]
    peak_per_s: float
    slo_s: float


class Turn(NamedTuple):
    """A day under a policy.

    Attributes:
        answers: of the day's calls.
        is_right: whether the image shows what the prompt says; None without an image.
        heavy_s: seconds of a heavy image alone, afterwards.
        cores: that were busy meanwhile, by role; and those of processes outside the service.
    """

    policy: str
    answers: Sequence[Made]
    is_right: Sequence[bool | None]
    heavy_s: float
    cores: Mapping[str, Any]

    @property
    def delivered(self) -> list[float]:
        """1 for each call with an image in time that is all right, 0 for the others."""
        pairs = zip(self.answers, self.is_right, strict=True)
        return [float(bool(right) and one.fate == "in time") for one, right in pairs]

    @property
    def violations(self) -> list[float]:
        """1 for each call without an image in time, 0 for the others."""
        return [float(one.fate != "in time") for one in self.answers]

    @property
    def heavies(self) -> list[float]:
        """1 for each image of the heavy model, 0 for the others, NaN without one."""
        return [float(one.is_heavy) if one.image else math.nan for one in self.answers]


def live_replicas(service: Running) -> dict[str, set[str]]:
    """Return the live replicas that the dispatcher knows, by model."""
    found: dict[str, set[str]] = {LIGHT: set(), HEAVY: set()}
    for sample in samples(service.url, "ray_cluster_free_places"):
        found.setdefault(sample.labels["model"], set()).add(sample.labels["replica"])
    return found


def plan_of(service: Running) -> dict[str, Any]:
    """Return the controller's plan."""
    with service.client() as client:
        found: dict[str, Any] = client.get("/v1/plan").raise_for_status().json()
    return found


def measure(study: Study) -> None:
    """Measure all turns."""
    prompts, cores = mixed_prompts(study.pick(150, 10)), [effective_cores()]
    with study.part(0.0, 0.2):
        day = prepare(study, prompts)
    turns = []
    with study.part(0.2, 1.0):
        for number, policy in enumerate(ORDER):
            study.say(number / len(ORDER), f"live: {policy}")
            turns.append(take_turn(policy, day))
    tabulate(study, day, turns, [*cores, effective_cores()])


def effective_cores() -> float:
    """Return how many times the work of one process as many as there are cores do at once."""

    def work(count: int) -> int:
        command = [sys.executable, "-c", _SPIN]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
        return sum(int(one.communicate()[0]) for one in processes)

    alone = work(1)
    return round(work(len(os.sched_getaffinity(0))) / alone, 2)


def prepare(study: Study, prompts: Sequence[SuitePrompt]) -> Day:
    """Learn what the machine can do, and draw the day."""
    supply = 100 * max(2, os.cpu_count() or 2) - _JUDGE
    # replicas that there are CPUs for beside the discriminator: one of the light model, the rest
    num_heavy = max(1, (supply - min(_SHARES)) // max(_SHARES))
    change = Controlled(
        cascade={**_UNBOUNDED, "reserve_s": None}, pools={HEAVY: {"replicas": num_heavy}}
    )
    with running(Contender(change=change.of)) as service:
        wait_for(lambda: is_up(service), "the models answer")
        wait_for(lambda: len(live_replicas(service)[HEAVY]) == num_heavy, "all heavy replicas")
        study.say(0.5, "capacity")
        with service.client() as client:
            routes_s = [post(client, prompt).total_s for prompt in prompts[:_NUM_ROUTES]]

        def act(client: httpx.Client, number: int, call: int) -> None:
            post(client, prompts[(number + _CLIENTS * call) % len(prompts)], quality="high")

        per_s = rate_per_s(service, _CLIENTS, act, study.pick(15.0, 2.0))
    slo_s = round(_SLACK * percentile(routes_s, 50), 2)
    return squeezed_day(per_s, study.pick(180.0, 25.0), slo_s, prompts)


def squeezed_day(
    capacity_per_s: float, duration_s: float, slo_s: float, prompts: Sequence[SuitePrompt]
) -> Day:
    """Return a day's calls from a night at a low rate to noon at a high one; always the same.

    The gaps between calls have a coefficient of variation of 1.2 at every rate. Prompts take
    turns in a random order, so that all of them come equally often.
    """
    rng, high_per_s = np.random.default_rng(_SEED), _HIGH * capacity_per_s
    rate = daily_rate(_LOW * capacity_per_s, high_per_s, duration_s)
    instants = draw_arrivals(rate, rng, cv=_CV).tolist()
    rounds = max(1, math.ceil(len(instants) / len(prompts)))
    order = np.concatenate([rng.permutation(len(prompts)) for _ in range(rounds)])
    chosen = tuple(prompts[one] for one in order[: len(instants)])
    return Day(tuple(instants), chosen, high_per_s, slo_s)


def take_turn(policy: str, day: Day) -> Turn:
    """Send the day's calls to a service of its own."""
    change = POLICIES[policy]
    own = Controlled(change.control, change.cascade, default_slo_s=day.slo_s)
    with running(Contender(change=own.of)) as service:
        wait_for(lambda: is_up(service), "the models answer")
        if own.control is not None:
            wait_for(lambda: _plans_cascade(service), "the cascade is planned")
        with service.client() as client:
            client.timeout = httpx.Timeout(day.slo_s + _PATIENCE_S)

            def send(number: int) -> Made:
                return post(client, day.prompts[number], day.slo_s, when_late="refuse")

            meter = CpuMeter()
            replies = open_loop(day.instants_s, send)
            cores = meter.read(0.0)
            client.timeout = httpx.Timeout(TIMEOUT_S)
            # not before: the controller would plan for them
            alone = [post(client, one, quality="high") for one in day.prompts[:_NUM_ROUTES]]
            heavy_s = percentile([one.total_s for one in alone], 50)
    answers = [one or Made("failed", 0.0) for one in replies]
    made = [place for place, one in enumerate(answers) if one.image]
    found = right_images([day.prompts[one] for one in made], [answers[one].image for one in made])
    right = dict(zip(made, found, strict=True))
    return Turn(
        policy, answers, [right.get(place) for place in range(len(answers))], heavy_s, cores
    )


def tabulate(study: Study, day: Day, turns: Sequence[Turn], cores: Sequence[float]) -> None:
    """Add the tables and aims.

    Args:
        cores: effective ones before and after.
    """
    study.found["what"] = (
        f"{cores[0]:g} effective cores before, {cores[-1]:g} after; {len(day.instants_s)} calls "
        f"for each turn, up to {day.peak_per_s:.2f} a second, {_HIGH:g} times what the heavy model "
        f"makes on all cores; deadline {day.slo_s:g} s"
    )
    for number, one in enumerate(turns, 1):
        fates = [answer.fate for answer in one.answers]
        right, count = [own for own in one.is_right if own is not None], len(fates)
        columns = {
            "calls": count,
            "violations, %": str(Share(sum(map(int, one.violations)), count)),
            **{fate: fates.count(fate) for fate in ("late", "refused", "failed")},
            "all right, %": str(Share(sum(right), len(right))),
            "of calls right in time, %": str(Share(round(sum(one.delivered)), count)),
            "heavy, %": _percent(one.heavies),
            "heavy image alone, s": round(one.heavy_s, 3),
            "busy cores": round(sum(one.cores["cores_by_role"].values()), 2),
            "of others": one.cores["cores_of_others"],
        }
        study.row("turns", policy=f"{one.policy}, turn {number}", **columns)
        for place in range(math.ceil((day.instants_s[-1] + 1e-9) / _BIN_S)):
            inside = [at_s // _BIN_S == place for at_s in day.instants_s]
            shares = {"of calls right in time, %": one.delivered, "heavy, %": one.heavies}
            figures = {name: _percent(own, inside) for name, own in shares.items()}
            about = {"turn": f"{number} {one.policy}", "from_s": place * _BIN_S}
            study.row("over time", **about, calls=sum(inside), **figures)
    own, others = ([t for t in turns if t.policy == policy] for policy in (OURS, STATIC))
    share = Share(sum(sum(map(int, t.violations)) for t in own), sum(len(t.answers) for t in own))
    low, high = (100 * end for end in share.interval)
    violated = {"value": 100 * share.value, "low": low, "high": high}
    study.at_most("violations", MOST_VIOLATIONS, violated, "%")
    more = gap(*([one for t in side for one in t.delivered] for side in (others, own)))
    title = f"of calls right in time by {STATIC} more than by {OURS}"
    study.at_most(title, 0.0, more, "points")
    for y in ("of calls right in time, %", "heavy, %"):
        study.plots.append(Plot("over time", "from_s", (y,), ("turn",)))


def _percent(values: Sequence[float], chosen: Sequence[bool] | None = None) -> float | None:
    known = [
        one
        for one, is_chosen in zip(values, chosen or [True] * len(values), strict=True)
        if is_chosen and not math.isnan(one)
    ]
    return round(100 * sum(known) / len(known), 1) if known else None


def gap(ours: Sequence[float], others: Sequence[float]) -> Figure:
    """Return the mean of the one less that of the other in points, of the same calls.

    Calls are drawn anew in pairs for the interval.
    """
    differences = 100 * (np.array(ours) - np.array(others))
    drawn = differences[resamples(len(differences))].mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"value": float(differences.mean()), "low": float(low), "high": float(high)}


def is_up(service: Running) -> bool:
    """Return whether both models and the discriminator answer."""
    [prompt] = mixed_prompts(1)
    with service.client() as client:
        ways: Sequence[dict[str, str]] = ({"quality": "low"}, {"quality": "high"}, {})
        made = [post(client, prompt, 120.0, **fields) for fields in ways]
    return all(one.image for one in made) and made[-1].cascade["confidence"] is not None


def _plans_cascade(service: Running) -> bool:
    latest = plan_of(service)["latest"]
    return latest is not None and bool(latest["cascades"])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a service has started.

    Raises:
        TimeoutError: it has not.
    """
    if not until(condition, most_s=START_S):
        raise TimeoutError(f"waited in vain until {what}")
