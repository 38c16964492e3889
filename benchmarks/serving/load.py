"""Many clients for minutes: what fails, how long calls take, and whether memory grows."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from typing import Any

import httpx
import numpy as np

from benchmarks.figures import percentile
from benchmarks.harness import Study
from benchmarks.serving.processes import cpu_ms_per_request, cpu_s_by_role, memory_by_role
from benchmarks.serving.services import Contender, calling, image_body, running

ROLES = ("gateway", "dispatcher")
# growth that counts as none: below it, an hour of load takes less than the spread of two starts
MAX_SLOPE_MIB_PER_MIN = 1.0
# the first part of the run fills caches, pools and the heap: later growth is another matter
_WARM_UP_S = 60.0
_NUM_STEPS, _FEWEST = 1, 6
_SMALLEST = "64x64"


def measure(study: Study) -> None:
    """Measure latencies, errors and the memory of the processes over time."""
    load_s, num = study.pick(300.0, 20.0), 64
    seconds: dict[str, list[float]] = {"attached": [], "job": []}
    errors: dict[str, Counter[str]] = {kind: Counter() for kind in seconds}
    kinds = {"attached": _attached, "job": _job}

    def act(client: httpx.Client, number: int, call: int) -> None:
        kind, started_s = ("attached", "job")[number % 2], time.perf_counter()
        try:
            kinds[kind](client, (number << 32) + call)
        except (httpx.HTTPError, ValueError) as error:
            errors[kind][f"{type(error).__name__}: {error}"[:200]] += 1
            time.sleep(0.5)
        else:
            seconds[kind].append(time.perf_counter() - started_s)

    with running(Contender()) as service:
        before, started_s = cpu_s_by_role(), time.perf_counter()
        with calling(service, num, act):
            own_mib = _memory_over_time(study, load_s, study.pick(10.0, 2.0))
            took_s, after = time.perf_counter() - started_s, cpu_s_by_role()
    done = sum(map(len, seconds.values()))
    study.found["what"] = (
        f"{num} clients for {took_s:.0f} s, {_SMALLEST} px, {_NUM_STEPS} step, no guidance: half "
        "attached calls, half jobs with their events"
    )
    study.note(f"{done / took_s:.1f} images per second")
    for kind, own in seconds.items():
        p50, p99 = (percentile(own, one) if own else None for one in (50, 99))
        study.row(
            "calls", calls=kind, done=len(own), p50_s=p50, p99_s=p99, errors=dict(errors[kind])
        )
        for what, count in errors[kind].items():
            study.fail(f"{kind}, {count} times: {what}")
    for role, found in own_mib.items():
        row = study.row("memory (own pages, MiB)", **growth_row(role, found, load_s))
        if role in ROLES:
            name = f"memory of the {role} under load"
            study.at_most(name, MAX_SLOPE_MIB_PER_MIN, row["per_min"], "MiB/min")
    study.found["cpu_ms_per_request"] = cpu_ms_per_request(before, after, max(1, done))
    study.found["own_mib"] = own_mib


def _attached(client: httpx.Client, seed: int) -> None:
    client.post("/v1/images/generations", json=_body(seed)).raise_for_status()


def _job(client: httpx.Client, seed: int) -> None:
    created = client.post("/v1/jobs", json=_body(seed)).raise_for_status().json()
    last = ""
    with client.stream("GET", f"/v1/jobs/{created['id']}/events") as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            last = line.removeprefix("data: ") if line.startswith("data: ") else last
    state = json.loads(last or "{}").get("state")
    if state != "completed":
        raise ValueError(f"the events of a job end with {state}")


def _body(seed: int) -> dict[str, Any]:
    return image_body(seed, _NUM_STEPS, size=_SMALLEST, guidance_scale=1.0)


def _memory_over_time(
    study: Study, load_s: float, every_s: float
) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, MiB) of each role's own pages over the time of the load.

    Not the proportional set size: that jumps in all processes when another one ends that has
    shared pages with them.
    """
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    started_s = time.perf_counter()
    # on a busy machine looking at all processes takes a while
    while (now_s := time.perf_counter() - started_s) < load_s or len(samples[ROLES[0]]) < _FEWEST:
        study.say(min(1.0, now_s / load_s), "clients")
        by_role = {row["role"]: row["own_mib"] for row in memory_by_role()}
        for role in (*ROLES, "Serve proxy", "model replica"):
            samples[role].append((round(now_s, 1), by_role.get(role, 0.0)))
        time.sleep(every_s)
    return dict(samples)


def growth_row(role: str, own_mib: list[tuple[float, float]], load_s: float) -> dict[str, Any]:
    """Return how a role's memory grew after the first minute."""
    from_s = min(_WARM_UP_S, load_s / 3)
    slope, error = slope_per_min([one for one in own_mib if one[0] >= from_s])
    return {
        "role": role,
        "first": own_mib[0][1],
        "last": own_mib[-1][1],
        # the interval is that of a straight line through the samples
        "per_min": {"value": slope, "low": slope - 1.96 * error, "high": slope + 1.96 * error},
    }


def slope_per_min(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of a straight line through (seconds, MiB), per minute, and its error.

    Raises:
        ValueError: fewer than three samples.
    """
    if len(samples) < 3:
        raise ValueError(f"a slope needs three samples, given {len(samples)}")
    minutes, sizes = np.array(samples).T
    minutes = minutes / 60
    spread = ((minutes - minutes.mean()) ** 2).sum()
    slope = ((minutes - minutes.mean()) * (sizes - sizes.mean())).sum() / spread
    rest = sizes - sizes.mean() - slope * (minutes - minutes.mean())
    error = np.sqrt((rest**2).sum() / (len(samples) - 2) / spread)
    return float(slope), float(error)
