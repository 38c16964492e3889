"""Memory and CPU time of the processes of a running service."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

# what a process is called in tables, by a part of its command line; the first that is found
_ROLES = (
    ("BaseModel", "model replica"),
    ("ServeReplica:baseline", "model replica"),
    ("Dispatcher", "dispatcher"),
    ("Gateway", "gateway"),
    ("ProxyActor", "Serve proxy"),
    ("ServeController", "Serve controller"),
    ("ray_cluster.imaging.worker_process", "image coder"),
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


def service_processes() -> list[psutil.Process]:
    """Return the processes that this one started, directly or not, and itself."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def role_of(process: psutil.Process) -> str:
    """Return what a process is to the service."""
    if process.pid == os.getpid():
        return "benchmark (not of the service)"
    command = " ".join(process.cmdline()) or process.name()
    for part, role in _ROLES:
        if part in command:
            return role
    # results are shared: names of programs, no paths of this machine
    return f"other: {Path(command.split()[0]).name}"


def memory_by_role() -> list[dict[str, Any]]:
    """Return the proportional set size of every process, grouped by role, largest first."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for process in service_processes():
        try:
            sizes[role_of(process)].append(process.memory_full_info().pss / 2**20)
        except psutil.NoSuchProcess:
            continue
    rows = [
        {
            "role": role,
            "processes": len(values),
            "pss_mib": [round(value, 1) for value in values],
            "sum_mib": round(sum(values), 1),
        }
        for role, values in sizes.items()
    ]
    return sorted(rows, key=lambda row: -row["sum_mib"])


def cpu_s_by_role() -> dict[str, float]:
    """Return the CPU seconds that the processes have used so far, by role."""
    used: dict[str, float] = defaultdict(float)
    for process in service_processes():
        try:
            times = process.cpu_times()
            used[role_of(process)] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return dict(used)


class CpuMeter:
    """Counts, from its making, the cores that this process's family kept busy, and others did.

    Of the cores that this process may run on; its family is bound to the same.
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
        shares = {role: round(used / took_s, 3) for role, used in sorted(used_s.items())}
        return {
            "cores_by_role": {role: share for role, share in shares.items() if share >= 0.005},
            "cores_of_others": round(max(0.0, others_s) / took_s, 3),
        }


def _busy_s() -> float:
    """Return the seconds for which the cores that this process may use have been busy."""
    by_core = psutil.cpu_times(percpu=True)
    usable = [by_core[core] for core in os.sched_getaffinity(0)]
    return float(sum(sum(one) - one.idle - getattr(one, "iowait", 0.0) for one in usable))
