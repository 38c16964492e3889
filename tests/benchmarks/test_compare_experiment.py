"""The whole way of a run, with a service of no worth."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.serving.compare import experiment, service_process
from benchmarks.serving.compare.calibration import Calibration, measure_alone
from benchmarks.serving.compare.cells import CellStore
from benchmarks.serving.compare.client_run import run_client
from benchmarks.serving.compare.contenders import Counts, Launch, Site
from benchmarks.serving.compare.experiment import Experiment, missing_blocks
from benchmarks.serving.compare.service_process import ServiceProblem, running
from tests.benchmarks.comparing import ALONE_S, SETTINGS, traces

STUB = Path(__file__).with_name("stub_service.py")
STUBBED = replace(
    SETTINGS, contenders=("stub",), loads=(1.0, 2.0), num_traces=1, num_requests=20, slo_times=300.0
)


@dataclass(frozen=True)
class StubContender:
    what: str = "a service of no worth"
    call: Mapping[str, Any] = field(default_factory=dict)
    omits: tuple[str, ...] = ()
    program: str = str(STUB)
    forgets: int = 0

    def launch(self, site: Site) -> Launch:
        # not the first free one from some port on: other workers may look for that too
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return Launch((sys.executable, self.program, str(port)), f"http://127.0.0.1:{port}")

    def counts(self, url: str) -> Counts:
        found = Counts(**httpx.get(f"{url}/counts", timeout=5).json())
        return replace(found, completed=max(0, found.completed - self.forgets))


def stubbed(folder: Path, most_others: float = math.inf) -> tuple[Experiment, CellStore]:
    store = CellStore(folder, STUBBED)
    calibration = Calibration(ALONE_S, ALONE_S, {"stub": 40.0}, {})
    run = Experiment(folder, STUBBED, calibration, store, ["a circle"], most_others=most_others)
    return run, store


def test_block_is_run_and_another_process_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "CONTENDERS", {"stub": StubContender()})
    monkeypatch.setattr("benchmarks.serving.compare.calibration.CONTENDERS", experiment.CONTENDERS)
    drawn = traces(STUBBED, rate_per_s=40.0)
    run, store = stubbed(tmp_path)
    first, *rest = missing_blocks(STUBBED, drawn, store)
    run.run(first, lambda _done, _text: None)
    again = CellStore(tmp_path, STUBBED)
    assert [block.name for block in missing_blocks(STUBBED, drawn, again)] == [
        block.name for block in rest
    ]
    refused = sum(one.seed % 7 == 6 for one in first.trace.requests)
    assert refused > 0
    for cell in first.cells:
        found = again[cell]
        assert found["fates"]["refused"] == refused
        assert found["fates"]["in time"] == 20 - refused
        assert found["books"]["nothing_lost"]
        assert found["books"]["client_and_service"]["accepted"] == [20 - refused] * 2
        assert 0 < found["client"]["cpu_share"] < 2
    kept = list((tmp_path / "images" / first.trace.name / "stub").glob("*.png"))
    assert len(kept) == 20 - refused


def test_contender_is_not_told_what_it_omits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []

    def note(url: str, calls: Sequence[tuple[float, dict[str, Any]]], **options: Any) -> Any:
        sent.extend(body for _, body in calls)
        return run_client(url, calls, **options)

    stubs = {"stub": StubContender(call={"when_late": "accept"}, omits=("slo_s",))}
    monkeypatch.setattr(experiment, "CONTENDERS", stubs)
    monkeypatch.setattr("benchmarks.serving.compare.calibration.CONTENDERS", stubs)
    monkeypatch.setattr(experiment, "run_client", note)
    run, store = stubbed(tmp_path)
    [block, *_] = missing_blocks(STUBBED, traces(STUBBED, rate_per_s=40.0), store)
    run.run(block, lambda _done, _text: None)
    assert {one["when_late"] for one in sent} == {"accept"}
    assert not any("slo_s" in one for one in sent)
    # it is judged by its deadlines all the same
    assert store[block.cells[0]]["fates"]["in time"] > 0


def test_book_that_never_settles_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "CONTENDERS", {"stub": StubContender(forgets=1000)})
    monkeypatch.setattr("benchmarks.serving.compare.calibration.CONTENDERS", experiment.CONTENDERS)
    monkeypatch.setattr(experiment, "_SETTLE_S", 0.3)
    run, store = stubbed(tmp_path)
    [block, *_] = missing_blocks(STUBBED, traces(STUBBED, rate_per_s=40.0), store)
    run.run(replace(block, cells=block.cells[:1]), lambda _done, _text: None)
    assert not store[block.cells[0]]["books"]["nothing_lost"]


def test_disturbed_run_is_made_again_and_the_calmest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([0.9, 0.3, 0.6, 0.1])
    monkeypatch.setattr(
        experiment.CpuMeter, "read", lambda *_, **__: {"cores_of_others": next(others)}
    )
    monkeypatch.setattr(experiment, "CONTENDERS", {"stub": StubContender()})
    monkeypatch.setattr("benchmarks.serving.compare.calibration.CONTENDERS", experiment.CONTENDERS)
    run, store = stubbed(tmp_path, most_others=0.2)
    [block, *_] = missing_blocks(STUBBED, traces(STUBBED, rate_per_s=40.0), store)
    run.run(block, lambda _done, _text: None)
    # three tries, all disturbed; then one that was not
    assert [store[cell]["cores_of_others"] for cell in block.cells] == [0.3, 0.1]
    assert next(others, None) is None


def test_images_alone_are_measured_for_every_shape(tmp_path: Path) -> None:
    with running(StubContender(), dtype="float32", alone_s={}, log=tmp_path / "log") as url:
        found = measure_alone(url, STUBBED, ["a circle"])
    assert set(found) == set(ALONE_S)
    assert all(work_s == 0.001 < total_s for work_s, total_s in found.values())


def test_service_that_ends_at_once_says_why(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('no model here')")
    contender = StubContender(program=str(program))
    with pytest.raises(ServiceProblem, match="no model here"):
        run_and(contender, tmp_path, lambda: None)


def test_process_that_would_stay_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_process, "_LEAVE_S", 1.0)
    program, noted = tmp_path / "leaves.py", tmp_path / "pid"
    program.write_text(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(noted)!r}).write_text(str(child.pid))\n"
        f"exec(open({str(STUB)!r}).read())\n"
    )
    seen = []
    with pytest.raises(ServiceProblem, match="did not stop by itself"):
        run_and(StubContender(program=str(program)), tmp_path, lambda: seen.append(pid_in(noted)))
    assert seen == [True]
    assert not pid_in(noted)


def run_and(contender: StubContender, folder: Path, then: Callable[[], None]) -> None:
    with running(contender, dtype="float32", alone_s={}, log=folder / "log"):
        then()


def pid_in(file: Path) -> bool:
    """Whether the process whose id stands in a file runs."""
    try:
        return psutil.Process(int(file.read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
