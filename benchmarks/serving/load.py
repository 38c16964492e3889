"""Many clients for minutes: what fails, how long calls take, and whether memory grows."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.serving.calls import image_body, running_service
from benchmarks.serving.processes import cpu_ms_per_request, cpu_s_by_role, memory_by_role
from benchmarks.settings import Report, Settings
from benchmarks.stats import percentile
from benchmarks.verdicts import at_most

ROLES = ("gateway", "dispatcher")
# growth that counts as none: below it, an hour of load takes less than the spread of two starts
MAX_SLOPE_MIB_PER_MIN = 1.0
# the first part of the run fills caches, pools and the heap: later growth is another matter
_WARM_UP_S = 60.0
_TIMEOUT_S = 120.0
_NUM_STEPS = 1
_SMALLEST = "64x64"


@dataclass(slots=True)
class _Client:
    """What one client has seen."""

    kind: str
    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Return latencies, errors and the memory of the processes over time."""
    report(0.0, "starting Ray and Serve")
    half = settings.load_clients // 2
    clients = [_Client(kind) for kind in ("attached", "job") for _ in range(half)]
    stop = threading.Event()
    with running_service(1) as (url, _):
        threads = [
            threading.Thread(target=_call_until, args=(stop, url, client, number))
            for number, client in enumerate(clients)
        ]
        before, started_s = cpu_s_by_role(), time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            own_mib = _memory_over_time(settings, started_s, report)
            took_s, after = time.perf_counter() - started_s, cpu_s_by_role()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    done = sum(len(client.seconds) for client in clients)
    growth = [growth_row(role, own_mib[role], settings.load_s) for role in own_mib]
    rows = [_latencies(kind, clients) for kind in ("attached", "job")]
    return {
        "what": f"{len(clients)} clients for {took_s:.0f} s, {_SMALLEST} px, {_NUM_STEPS} step, no "
        "guidance: half attached calls, half jobs with their events",
        "tables": {"calls": rows, "memory (own pages, MiB)": growth},
        "notes": [f"{done / took_s:.1f} images per second"],
        "cpu_ms_per_request": cpu_ms_per_request(before, after, max(1, done)),
        "own_mib": own_mib,
        "aims": [growth_aim(row).as_dict() for row in growth if row["role"] in ROLES],
        "problems": [
            f"{row['calls']}, {count} times: {what}"
            for row in rows
            for what, count in row["errors"].items()
        ],
    }


def _call_until(stop: threading.Event, url: str, seen: _Client, number: int) -> None:
    call: Callable[[httpx.Client, int], None] = _attached if seen.kind == "attached" else _job
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        seed = number << 32
        while not stop.is_set():
            started_s = time.perf_counter()
            try:
                call(client, seed)
            except (httpx.HTTPError, ValueError) as error:
                seen.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                stop.wait(0.5)
            else:
                seen.seconds.append(time.perf_counter() - started_s)
            seed += 1


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
    return image_body(seed, num_steps=_NUM_STEPS, size=_SMALLEST, guidance_scale=1.0)


def _memory_over_time(
    settings: Settings, started_s: float, report: Report
) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, MiB) of each role's own pages over the time of the load.

    Not the proportional set size: that jumps in all processes when another one ends that has
    shared pages with them.
    """
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    while (now_s := time.perf_counter() - started_s) < settings.load_s:
        report(now_s / settings.load_s, f"{settings.load_clients} clients")
        by_role = {row["role"]: row["own_mib"] for row in memory_by_role()}
        for role in (*ROLES, "Serve proxy", "model replica"):
            samples[role].append((round(now_s, 1), by_role.get(role, 0.0)))
        time.sleep(settings.load_sample_s)
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


def growth_aim(row: dict[str, Any]) -> Any:
    """Return the aim for a role's :func:`growth_row`."""
    slope = row["per_min"]
    name, interval = f"memory of the {row['role']} under load", (slope["low"], slope["high"])
    return at_most(name, MAX_SLOPE_MIB_PER_MIN, slope["value"], interval, "MiB/min")


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


def _latencies(kind: str, clients: list[_Client]) -> dict[str, Any]:
    own = [client for client in clients if client.kind == kind]
    seconds = [one for client in own for one in client.seconds]
    errors = sum((client.errors for client in own), Counter())
    return {
        "calls": kind,
        "done": len(seconds),
        "p50_s": percentile(seconds, 50) if seconds else None,
        "p99_s": percentile(seconds, 99) if seconds else None,
        "errors": dict(errors),
    }
