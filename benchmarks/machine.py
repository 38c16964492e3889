"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from ray_cluster.process.machine import cpu_model

ROOT = Path(__file__).resolve().parent.parent
_FEATURES = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16"}
_PACKAGES = (
    *("torch", "triton", "diffusers", "transformers"),
    *("ray", "numpy", "ortools", "httpx", "pillow"),
)


def describe_run(name: str, *, quick: bool, started: datetime) -> dict[str, Any]:
    """Return what stands at the head of a file of results.

    Args:
        name: of the file's format.
        quick: whether figures are not to be quoted.
    """
    return {
        "format": name,
        "quick": quick,
        "started": started.isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "commit": commit(),
        "versions": versions(),
        "load_before": load_now(),
    }


def describe_machine() -> dict[str, Any]:
    """Return processor, cores (also those that this process may run on) and memory."""
    return {
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cpu_features() -> list[str]:
    """Return the vector instructions that matter to a model's speed, as Linux names them."""
    path = Path("/proc/cpuinfo")
    words = path.read_text(encoding="utf-8").split() if path.exists() else ()
    return sorted(_FEATURES & set(words))


def load_now() -> dict[str, Any]:
    """Return how busy the machine is: load averages, and the share of the cores in use."""
    return {
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "cpu_percent": psutil.cpu_percent(interval=0.5),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that the figures depend on."""
    found = {}
    for name in _PACKAGES:
        found[name] = "not installed"
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str:
    """Return the commit of the working tree, with ``+changes`` if it is not clean."""
    head = _git("rev-parse", "HEAD")
    is_changed = _git("status", "--porcelain", "--untracked-files=no")
    return (head + "+changes" * bool(is_changed)) or "none"


def _git(*words: str) -> str:
    with suppress(OSError):
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
