"""Memory and CPU time of the processes of a running service."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
OWN = "benchmark (not of the service)"
# what a process is called in tables, by a part of its command line; the first that is found
_ROLES = (
    ("BaseModel", "model replica"),
    ("Discriminator", "discriminator"),
    ("ServeReplica:baseline", "model replica"),
    ("Dispatcher", "dispatcher"),
    ("Gateway", "gateway"),
    ("ProxyActor", "Serve proxy"),
    ("ServeController", "Serve controller"),
    ("ray_cluster.imaging.processes.worker_process", "image coder"),
    ("ray_cluster.cli", "serve command"),
    ("gcs_server", "Ray: gcs"),
    ("raylet/raylet", "Ray: raylet"),
    ("RuntimeEnvAgent", "Ray: runtime-env agent"),
    ("DashboardAgent", "Ray: dashboard agent"),
    ("DashboardHead", "Ray: dashboard"),
    ("dashboard", "Ray: dashboard"),
    ("log_monitor", "Ray: log monitor"),
    ("monitor.py", "Ray: autoscaler monitor"),
    ("ray::IDLE", "Ray: idle worker"),
    ("multiprocessing.", "Ray: dashboard"),
)


def role_of(process: psutil.Process) -> str:
    """Return the role of a process in the service."""
    if process.pid == os.getpid():
        return OWN
    command = " ".join(process.cmdline()) or process.name()
    for part, role in _ROLES:
        if part in command:
            return role
    # results are shared: names of programs, no paths of this machine
    return f"other: {Path(command.split()[0]).name}"


def _by_role(read: Callable[[psutil.Process], T]) -> dict[str, list[T]]:
    """Return a reading of this process and of all that it started, directly or not, by role."""
    this = psutil.Process()
    found: dict[str, list[T]] = defaultdict(list)
    for process in (this, *this.children(recursive=True)):
        try:
            reading = read(process)
            found[role_of(process)].append(reading)
        except psutil.NoSuchProcess:
            continue
    return found


def memory_by_role() -> list[dict[str, Any]]:
    """Return the memory of the processes by role: proportional set size and own pages."""
    rows = [
        {
            "role": role,
            "processes": len(found),
            "pss_mib": round(sum(one.pss for one in found) / 2**20, 2),
            "own_mib": round(sum(one.uss for one in found) / 2**20, 2),
        }
        for role, found in _by_role(lambda process: process.memory_full_info()).items()
    ]
    return sorted(rows, key=lambda row: -row["pss_mib"])


def cpu_s_by_role() -> dict[str, float]:
    """Return the CPU seconds that the processes have used so far, by role."""
    found = _by_role(lambda process: process.cpu_times())
    return {role: sum(one.user + one.system for one in own) for role, own in found.items()}


def cpu_ms_per_request(
    before: dict[str, float], after: dict[str, float], count: int
) -> dict[str, float]:
    """Return the CPU milliseconds of each role per request between two readings."""
    used = {role: after[role] - before.get(role, 0.0) for role in after}
    return {role: round(1e3 * s / count, 2) for role, s in sorted(used.items()) if s > 0}


class CpuMeter:
    """Measures, from its making, how many cores the service and other processes kept busy.

    Only the cores that this process may run on count; the service is bound to the same.
    """

    def __init__(self) -> None:
        self._used_s, self._busy_s = cpu_s_by_role(), _busy_s()
        self._started_s = time.perf_counter()

    def read(self, client_cpu_s: float) -> dict[str, Any]:
        """Return busy cores by role, and those of processes that have nothing to do with it.

        Args:
            client_cpu_s: CPU seconds of a child that has ended meanwhile, which no role has.
        """
        # in the order in which the first readings were taken, so that all span the same time:
        # looking at every process takes a while on a busy machine
        used_s = {role: s - self._used_s.get(role, 0.0) for role, s in cpu_s_by_role().items()}
        others_s = _busy_s() - self._busy_s - sum(used_s.values()) - client_cpu_s
        took_s = time.perf_counter() - self._started_s
        return {
            "cores_by_role": {role: round(s / took_s, 3) for role, s in sorted(used_s.items())},
            "cores_of_others": round(max(0.0, others_s) / took_s, 3),
        }


def _busy_s() -> float:
    """Return the seconds for which the cores that this process may use have been busy."""
    by_core = psutil.cpu_times(percpu=True)
    usable = [by_core[core] for core in os.sched_getaffinity(0)]
    return float(sum(sum(one) - one.idle - getattr(one, "iowait", 0.0) for one in usable))
