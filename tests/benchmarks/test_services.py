"""Contenders are started, called and stopped, with a stub; and what sections make of the calls."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.serving import processes, services
from benchmarks.serving.load import growth_row, slope_per_min
from benchmarks.serving.processes import CpuMeter
from benchmarks.serving.service import split
from benchmarks.serving.services import (
    Contender,
    Counts,
    calling,
    image_body,
    open_loop,
    post_image,
    rate_per_s,
    running,
)

STUB = "tests.benchmarks.stub_service"


@dataclass(frozen=True, kw_only=True)
class Stub(Contender):
    module: str = STUB
    forgets: int = 0

    def command(self, folder: Path, port: int) -> list[str]:
        return [self.module, str(port)]

    def counts(self, url: str) -> Counts:
        found = Counts(**httpx.get(f"{url}/counts", timeout=5).json())
        return found._replace(completed=max(0, found.completed - self.forgets))


def test_clients_call_again_and_again_and_at_instants() -> None:
    with running(Stub()) as service:

        def act(client: httpx.Client, number: int, call: int) -> None:
            post_image(client, image_body(7 * call + number, 2))

        with calling(service, 2, act) as made:
            while min(made) < 3:
                time.sleep(0.01)
        assert Stub().counts(service.url).completed == sum(made)
        assert rate_per_s(service, 2, act, 0.2) > 0
        with service.client() as client:
            ended = open_loop([0.0, 0.01], lambda n: post_image(client, image_body(5 + n, 2)))
        # every seventh is refused
        assert [one is None for one in ended] == [False, True]
        assert ended[0] is not None
        assert ended[0].timing == {"work_s": 0.001}

        def wrong(client: httpx.Client, _number: int, _call: int) -> None:
            raise ArithmeticError

        with pytest.raises(ArithmeticError), calling(service, 1, wrong):
            time.sleep(0.2)
    with pytest.raises(httpx.ConnectError):
        httpx.get(service.url, timeout=5)


def test_a_service_that_ends_at_once_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no model here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no model here"), running(Stub(module="broken")):
        pass


def test_a_process_that_would_stay_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_LEAVE_S", 1.0)
    noted = tmp_path / "pid"
    (tmp_path / "leaves.py").write_text(
        "import pathlib, runpy, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(noted)!r}).write_text(str(child.pid))\n"
        f"runpy.run_module({STUB!r}, run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen: list[psutil.Process] = []

    def run() -> None:
        with running(Stub(module="leaves")):
            seen.append(psutil.Process(int(noted.read_text())))

    with pytest.raises(RuntimeError, match="did not stop by itself"):
        run()
    assert not seen[0].is_running() or seen[0].status() == psutil.STATUS_ZOMBIE


Times = namedtuple("Times", "user system idle iowait")


def test_only_work_of_others_on_the_cores_that_it_may_use_is_that_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a core is busy for 0.9 s of the second: 0.5 of the service, 0.1 of the client
    before, after = Times(10.0, 1.0, 50.0, 2.0), Times(10.7, 1.2, 50.1, 2.0)
    readings = iter([[before, Times(70.0, 3.0, 5.0, 0.0)], [after, Times(900.0, 3.0, 5.0, 0.0)]])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(processes.psutil, "cpu_times", lambda **_: next(readings))
    used = iter([{"gateway": 5.0}, {"gateway": 5.5}])
    monkeypatch.setattr(processes, "cpu_s_by_role", lambda: next(used))
    monkeypatch.setattr(processes.time, "perf_counter", iter([100.0, 101.0]).__next__)
    usage = CpuMeter().read(client_cpu_s=0.1)
    assert usage["cores_by_role"] == {"gateway": pytest.approx(0.5)}
    assert usage["cores_of_others"] == pytest.approx(0.3)


def test_a_slope_is_that_of_the_line_per_minute() -> None:
    slope, error = slope_per_min([(10.0 * index, 100 + 0.5 * index) for index in range(30)])
    assert (slope, error) == (pytest.approx(3.0), pytest.approx(0.0, abs=1e-9))
    slope, error = slope_per_min([(10.0 * index, 100 + (-1) ** index) for index in range(30)])
    assert abs(slope) < 1.96 * error
    with pytest.raises(ValueError, match="three samples"):
        slope_per_min([(0.0, 1.0), (1.0, 1.0)])


def test_memory_grows_after_the_first_minute_or_not_at_all() -> None:
    grown = [(10.0 * index, 100 + 5 * index / 6) for index in range(6, 30)]
    row = growth_row("gateway", [(0.0, 50.0), *grown], 300.0)
    assert row["per_min"]["value"] == pytest.approx(5)


def test_parts_of_the_service_overhead_add_up() -> None:
    timing = {"queue_s": 0.01, "encode_s": 0.02, "denoise_s": 0.3, "decode_s": 0.03}
    parts = split([0.5], [{**timing, "total_s": 0.4}])
    medians = {name: figures["median"] for name, figures in parts.items()}
    assert medians["overhead"] == pytest.approx(1e3 * (0.5 - 0.35))
    inner = medians["lease"] + medians["code_and_report"] + medians["http"]
    assert medians["overhead"] == pytest.approx(inner)
