"""Many clients for minutes: what fails, how long calls take, and whether memory grows."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.serving.processes import cpu_s_by_role, role_of, service_processes
from benchmarks.serving.running import base_url, image_body, running_service
from benchmarks.settings import Report, Settings
from benchmarks.stats import percentile

ROLES = ("gateway", "dispatcher")
# growth that counts as none: below it, an hour of load takes less than the spread of two starts
MAX_SLOPE_MIB_PER_MIN = 1.0
# the first part of the run fills caches, pools and the heap: it says nothing of later growth
_WARM_UP_S = 60.0
_TIMEOUT_S = 120.0
_NUM_STEPS = 1
_SMALLEST = "32x32"


_Sample = tuple[float, float, float]
"""Seconds since the start, proportional and own set size in MiB."""


@dataclass(slots=True)
class _Seen:
    """What one client has seen."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def measure_load(settings: Settings, report: Report) -> dict[str, Any]:
    """Return latencies, errors and the memory of the processes over time."""
    report(0.0, "starting Ray and Serve")
    with (
        tempfile.TemporaryDirectory(prefix="load-") as folder,
        running_service(1, storage=Path(folder)) as (config, _),
    ):
        return _Load(base_url(config), settings, report).run()


class _Load:
    def __init__(self, url: str, settings: Settings, report: Report) -> None:
        self._url = url
        self._settings = settings
        self._report = report
        self._stop = threading.Event()
        self._seen = {"attached": [_Seen() for _ in range(self._half)]}
        self._seen["job"] = [_Seen() for _ in range(self._half)]

    @property
    def _half(self) -> int:
        return self._settings.load_clients // 2

    def run(self) -> dict[str, Any]:
        threads = [
            threading.Thread(target=self._live, args=(kind, seen, number))
            for kind, clients in self._seen.items()
            for number, seen in enumerate(clients)
        ]
        cpu_s, started_s = cpu_s_by_role(), time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            samples = self._sample(started_s)
            took_s, used_s = time.perf_counter() - started_s, cpu_s_by_role()
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        done = sum(len(one.seconds) for clients in self._seen.values() for one in clients)
        return {
            "what": f"{self._settings.load_clients} clients for {took_s:.0f} s, {_SMALLEST} px, "
            f"{_NUM_STEPS} step, no guidance: half attached calls, half jobs with their events",
            "seconds": round(took_s, 1),
            "per_s": round(done / took_s, 2),
            "kinds": {kind: _latencies(clients) for kind, clients in self._seen.items()},
            "cpu_ms_per_request_by_role": {
                role: round(1e3 * (used - cpu_s.get(role, 0.0)) / max(1, done), 2)
                for role, used in sorted(used_s.items())
            },
            "memory": {role: self._growth(sizes) for role, sizes in samples.items()},
            "max_slope_mib_per_min": MAX_SLOPE_MIB_PER_MIN,
        }

    def _live(self, kind: str, seen: _Seen, number: int) -> None:
        call = self._attached if kind == "attached" else self._job
        with httpx.Client(base_url=self._url, timeout=_TIMEOUT_S) as client:
            seed = number << 32
            while not self._stop.is_set():
                started_s = time.perf_counter()
                try:
                    call(client, seed)
                except (httpx.HTTPError, ValueError) as error:
                    seen.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                    self._stop.wait(0.5)
                else:
                    seen.seconds.append(time.perf_counter() - started_s)
                seed += 1

    def _attached(self, client: httpx.Client, seed: int) -> None:
        client.post("/v1/images/generations", json=_body(seed)).raise_for_status()

    def _job(self, client: httpx.Client, seed: int) -> None:
        created = client.post("/v1/jobs", json=_body(seed)).raise_for_status().json()
        last = ""
        with client.stream("GET", f"/v1/jobs/{created['id']}/events") as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                last = line.removeprefix("data: ") if line.startswith("data: ") else last
        state = json.loads(last or "{}").get("state")
        if state != "completed":
            raise ValueError(f"the events of a job end with {state}")

    def _sample(self, started_s: float) -> dict[str, list[_Sample]]:
        """Return what the processes take by role, over the time of the load."""
        samples: dict[str, list[_Sample]] = defaultdict(list)
        duration_s = self._settings.load_s
        while (now_s := time.perf_counter() - started_s) < duration_s:
            self._report(now_s / duration_s, f"{self._settings.load_clients} clients")
            pss: Counter[str] = Counter()
            own: Counter[str] = Counter()
            for process in service_processes():
                try:
                    role, memory = role_of(process), process.memory_full_info()
                except psutil.NoSuchProcess:
                    continue
                pss[role] += memory.pss / 2**20
                own[role] += memory.uss / 2**20
            for role in (*ROLES, "Serve proxy", "model replica"):
                sample = (round(now_s, 1), round(pss[role], 2), round(own[role], 2))
                samples[role].append(sample)
            time.sleep(self._settings.load_sample_s)
        return dict(samples)

    def _growth(self, samples: list[_Sample]) -> dict[str, Any]:
        """Return the sizes, and how fast the process's own memory grows.

        Not the proportional one: that jumps in all processes when another one ends that has
        shared pages with them.
        """
        own = [(at_s, own) for at_s, _, own in samples]
        from_s = min(_WARM_UP_S, self._settings.load_s / 3)
        slope, error = slope_per_min([one for one in own if one[0] >= from_s])
        late_slope, _ = slope_per_min([one for one in own if one[0] >= self._settings.load_s / 2])
        return {
            "pss_mib": [(at_s, pss) for at_s, pss, _ in samples],
            "own_mib": own,
            "late_slope_mib_per_min": round(late_slope, 3),
            "slope_mib_per_min": round(slope, 3),
            # of a straight line through the samples
            "slope_ci95": [round(slope - 1.96 * error, 3), round(slope + 1.96 * error, 3)],
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


def _latencies(clients: list[_Seen]) -> dict[str, Any]:
    seconds = [one for client in clients for one in client.seconds]
    errors = sum((client.errors for client in clients), Counter())
    return {
        "requests": len(seconds),
        "p50_s": round(percentile(seconds, 50), 4) if seconds else None,
        "p99_s": round(percentile(seconds, 99), 4) if seconds else None,
        "errors": dict(errors),
    }


def _body(seed: int) -> dict[str, Any]:
    return image_body(seed, num_steps=_NUM_STEPS, guidance_scale=1.0) | {"size": _SMALLEST}
