"""A service with a controller: its configuration, its plan, its replicas, and who watches it."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.machine import ROOT
from benchmarks.serving.contenders import Launch, OwnContender, Site, free_port
from benchmarks.serving.service_process import running

CASCADE, LIGHT, HEAVY = "shapes-auto", "shapes-sd-light", "shapes-sd"
FILE = ROOT / "ray_cluster" / "configs" / "cascade.yaml"
TIMEOUT_S = 300.0
_FIRST_DASHBOARD = 19000
_START_S = 180.0
_LEAVE_S = 15.0
_POLL_S = 0.25
_REPLICA = re.compile(r'^ray_cluster_free_places\{model="([^"]+)",replica="([^"]+)"', re.MULTILINE)
_GCS = re.compile(r"--gcs-address=([\d.]+:\d+)")


@dataclass(frozen=True, kw_only=True)
class ControlledContender(OwnContender):
    """The service of ``configs/cascade.yaml``, with or without a controller.

    Attributes:
        control: the section of the controller; None without one.
        cascade: what differs from the file's cascade; None leaves cascade and discriminator out.
        pools: what differs from the file's pools, by name.
        default_slo_s: deadline that plans are made for.
        files: that the service was started from.
    """

    control: Mapping[str, Any] | None = None
    cascade: Mapping[str, Any] | None = field(default_factory=dict)
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default_slo_s: float = 60.0
    files: list[Path] = field(default_factory=list)

    def launch(self, site: Site) -> Launch:
        launch = super().launch(site)
        self.files.append(Path(launch.command[4]))
        return launch

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        given = yaml.safe_load(FILE.read_text(encoding="utf-8"))
        own = super().config(site, port)
        own["ray"] |= {
            "include_dashboard": True,
            "dashboard_port": free_port(_FIRST_DASHBOARD),
        }
        own |= {
            "pools": [{**one, **self.pools.get(one["name"], {})} for one in given["pools"]],
            "discriminators": [],
            "cascades": [],
            "loras": {"num_stores": 0},
            "limits": {"max_queued_images": 10_000, "max_queue_s": 1e6},
            "dispatch": {"default_slo_s": self.default_slo_s},
        }
        if self.cascade is not None:
            [cascade] = given["cascades"]
            own |= {
                "discriminators": given["discriminators"],
                "cascades": [{**cascade, **self.cascade}],
            }
        if self.control is not None:
            own["control"] = {"enabled": True, **self.control}
        return own


@dataclass(frozen=True, slots=True)
class Service:
    """A running service.

    Attributes:
        file: its configuration, whose settings are live.
    """

    url: str
    file: Path
    dashboard_url: str

    def client(self) -> httpx.Client:
        """Return a client without a bound on connections."""
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=limits)

    def plan(self) -> dict[str, Any]:
        """Return the controller's plan."""
        found = httpx.get(f"{self.url}/v1/plan", timeout=TIMEOUT_S).raise_for_status().json()
        assert isinstance(found, dict)
        return found

    def pause(self) -> None:
        """Have the service's own controller change nothing."""
        httpx.post(f"{self.url}/v1/plan/pause", timeout=TIMEOUT_S).raise_for_status()

    def live(self) -> dict[str, set[str]]:
        """Return the live replicas that the dispatcher knows, by model."""
        text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_S).raise_for_status().text
        found: dict[str, set[str]] = {LIGHT: set(), HEAVY: set()}
        for model, replica in _REPLICA.findall(text):
            found.setdefault(model, set()).add(replica)
        return found

    def scale(self, pool: str, num_replicas: int) -> None:
        """Change a pool's replicas by hand, through Ray Serve's scale endpoint."""
        path = f"/api/v1/applications/{pool}/deployments/BaseModel/scale"
        body = {"target_num_replicas": num_replicas}
        httpx.post(self.dashboard_url + path, json=body, timeout=30).raise_for_status()

    def tune(self, changes: Mapping[str, Mapping[str, Any]], **control: Any) -> None:
        """Change live settings: those of pools by name, and those of the controller."""
        content = yaml.safe_load(self.file.read_text(encoding="utf-8"))
        for pool in content["pools"]:
            pool.update(changes.get(pool["name"], {}))
            # of a start, which must lie within the bounds
            pool["replicas"] = max(
                pool.get("min_replicas", 1),
                min(pool.get("replicas", 1), pool.get("max_replicas") or math.inf),
            )
        content["control"].update(control)
        other = self.file.with_suffix(".new")
        other.write_text(yaml.safe_dump(content), encoding="utf-8")
        # its reader sees all of the old or all of the new
        other.replace(self.file)


@contextmanager
def controlled(contender: ControlledContender) -> Iterator[Service]:
    """The service within the block, once its gateway answers."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        with running(contender, dtype="float32", alone_s={}, log=log) as url:
            file = contender.files[-1]
            port = yaml.safe_load(file.read_text(encoding="utf-8"))["ray"]["dashboard_port"]
            yield Service(url, file, f"http://127.0.0.1:{port}")


def until(
    condition: Callable[[], bool], *, most_s: float = _START_S, every_s: float = _POLL_S
) -> bool:
    """Wait for a condition; return whether it came true in time. An HTTP error is a no."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s:
        with suppress(httpx.HTTPError):
            if condition():
                return True
        time.sleep(every_s)
    return False


def ray_address() -> str:
    """Return the address of the Ray that a process of this one has started.

    Raises:
        RuntimeError: there is none.
    """
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if found := _GCS.search(" ".join(process.cmdline())):
                return found[1]
    raise RuntimeError("no process of the service says where its Ray is")


@contextmanager
def watching(out: Path, *, policy: str, period_s: float) -> Iterator[None]:
    """Have the cell of the running service observed, and planned by a policy, within the block.

    In a process of its own: ``benchmarks.serving.controller_watch``.

    Args:
        out: file that the rounds go to.
        policy: see there.

    Raises:
        RuntimeError: it ended, or saw nothing in time.
    """
    command = (sys.executable, "-m", "benchmarks.serving.controller_watch", ray_address(), str(out))
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--policy", policy, "--period-s", str(period_s)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        )
    try:
        seen = until(lambda: process.poll() is not None or _has_lines(out))
        if process.poll() is not None or not seen:
            raise RuntimeError(f"nobody watches: {log.read_text(errors='replace')[-2000:]}")
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the watcher ended: {log.read_text(errors='replace')[-2000:]}")
    finally:
        process.terminate()
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
