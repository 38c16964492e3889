"""A contender as a user runs it: a process of its own, stopped by SIGTERM."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.machine import ROOT
from benchmarks.serving.contenders import Contender, Launch, Site

_START_S = 300.0
_STOP_S = 90.0
# for its processes, once it has ended
_LEAVE_S = 10.0
_LOG_CHARS = 2000


class ServiceProblem(RuntimeError):
    """A contender did not start, or did not stop."""


@contextmanager
def running(
    contender: Contender, *, dtype: str, alone_s: Mapping[str, float], log: Path
) -> Iterator[str]:
    """A contender that runs within the block, and of which nothing runs after it; yields its URL.

    Args:
        contender: who.
        dtype: of its model.
        alone_s: see :class:`Site`.
        log: file that its output goes to.

    Raises:
        ServiceProblem: see there.
    """
    # the paths of Ray's sockets must stay short
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "own").mkdir()
        (folder / "ray").mkdir()
        site = Site(folder / "own", folder / "ray", dtype, alone_s)
        launch = contender.launch(site)
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(),
                start_new_session=True,
            )
        try:
            _wait_ready(process, launch, log)
            yield launch.url
        finally:
            left = _stop(process)
            shutil.rmtree(folder / "ray", ignore_errors=True)
        if left:
            raise ServiceProblem(f"did not stop by itself and was killed: {', '.join(left)}")


def _environment() -> dict[str, str]:
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _wait_ready(process: subprocess.Popen[bytes], launch: Launch, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while not _is_ready(launch.url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            state = "ended" if process.poll() is not None else f"not ready after {_START_S:.0f} s"
            tail = log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
            raise ServiceProblem(f"{' '.join(launch.command)}: {state}\n{tail}")
        time.sleep(0.2)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> list[str]:
    """Stop a service and all its processes; return the names of those that had to be killed."""
    if process.poll() is not None:
        return []
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    left = []
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        left.append("the service")
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=_LEAVE_S)
    for one in alive:
        left.append(one.name())
        one.kill()
    psutil.wait_procs(alive, timeout=_LEAVE_S)
    return left
