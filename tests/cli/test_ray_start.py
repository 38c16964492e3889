"""A start of Ray that is slow or fails: what is shown, tried again and said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from ray_cluster.cli.checks.machine import check_machine
from ray_cluster.cli.service.ray_messages import busy_words, start_failure
from ray_cluster.config.sections.cell_wide import RayConfig
from tests.cli.conftest import Cli

# what ray.init raises of a dashboard that has not answered: its log, with a harmless error
LATE_DASHBOARD = """
The last 20 lines of /tmp/ray/session_1/logs/dashboard.log (it contains the error message ...):
2026-11-28 INFO head.py:1 -- Dashboard head grpc address: 127.0.0.1:44227
OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 52365)
"""
LATE = "(on this machine): its dashboard did not answer in time"
LATE_RAYLET = "The current node timed out during startup. This could happen because some of ..."


@pytest.mark.parametrize(
    ("text", "part"), [(LATE_DASHBOARD, "its dashboard"), (LATE_RAYLET, "one of its processes")]
)
@pytest.mark.parametrize("load", [1.0, 40.0])
def test_what_was_late_is_named_and_a_busy_machine(
    text: str, part: str, load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    words = start_failure(Exception(text), None)
    assert words.startswith(f"{part} did not answer in time")
    assert "98" not in words
    assert ("load 40 on 2 CPUs" in words) is (load == 40.0)
    [row] = [one for one in check_machine(RayConfig()) if one.subject == "load"]
    assert row.level == ("warning" if load == 40.0 else "ok")
    assert (busy_words() is None) is (load == 1.0)


def test_a_taken_port_and_other_reasons_are_named() -> None:
    taken = "Ray's dashboard cannot listen on 127.0.0.1:8265: the port is taken by process 1"
    assert start_failure(Exception(LATE_DASHBOARD), taken) == taken
    assert start_failure(ValueError("no disk"), None) == "no disk"


def test_doctor_checks_the_ports_of_the_command(
    cli: Cli, tiny_config: Path, taken_port: int
) -> None:
    for option in ("--port", "--dashboard-port"):
        result = cli("doctor", tiny_config, option, taken_port)
        assert f"port {taken_port}" in result.output
        assert "is taken by" in result.output
        assert result.exit_code == 1


SCRIPT = """
import sys
from ray._private import ray_constants
from ray_cluster.cli.service import ray_messages
from ray_cluster.cli.service.ray_service import RayService, ServiceFailed
from ray_cluster.config.loading import load_config

ray_messages._SLOW_S = ray_messages._LOOK_S = 0.2
is_lasting = sys.argv[2] != "passing"
if sys.argv[2] == "busy":
    ray_messages.BUSY_LOAD, ray_messages._GIVE_UP_S = 0.0, 0.0

def show(name, state, is_done=False):
    print(state)
    if "again" in state and not is_lasting:
        ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = 60

# none answers at once
ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = 60 if sys.argv[2] == "busy" else 0.5
service = RayService(load_config(sys.argv[1]))
try:
    service.connect(show)
    print("connected")
except ServiceFailed as error:
    print("failed:", error)
service.close(show)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["passing", "lasting", "busy"])
def test_a_late_dashboard_is_cleared_away_and_started_once_more(
    kind: str, tiny_config: Path, ray_folder: Path
) -> None:
    content = yaml.safe_load(tiny_config.read_text())
    content["ray"] |= {"temp_dir": str(ray_folder), "num_cpus": 1}
    tiny_config.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-c", SCRIPT, str(tiny_config), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        of_ray = psutil.Process(process.pid)
        seen: set[psutil.Process] = set()
        while process.poll() is None:
            seen.update(of_ray.children(recursive=True) if of_ray.is_running() else [])
            time.sleep(0.2)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert sum(one.startswith("starting again") and LATE in one for one in lines) == 1, lines
    assert any(one.startswith("starting, waiting for its") for one in lines), lines
    if kind == "passing":
        assert "connected" in lines
    else:
        [failed] = [one for one in lines if one.startswith("failed:")]
        assert LATE in failed
        assert ("on a busy machine (load" in failed) or kind != "busy"
    assert seen
    assert not [one for one in seen if one.is_running()]
