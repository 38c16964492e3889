"""The whole way of a run, with a stub service."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.serving import service_process
from benchmarks.serving.compare import calibration, experiment
from benchmarks.serving.compare.calibration import Calibration, measure_alone
from benchmarks.serving.compare.experiment import Experiment, call_body, missing_blocks
from benchmarks.serving.compare.results import ResultStore
from benchmarks.serving.contenders import Contender, Counts, Launch, Site
from benchmarks.serving.service_process import ServiceProblem, running
from tests.benchmarks.comparing import ALONE_S, SETTINGS, traces

STUB = Path(__file__).with_name("stub_service.py")
STUBBED = replace(
    SETTINGS, contenders=("stub",), loads=(1.0, 2.0), num_traces=1, num_requests=20, slo_times=300.0
)


@dataclass(frozen=True, kw_only=True)
class StubContender(Contender):
    what: str = "a stub service"
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


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[StubContender], None]:
    """Makes a contender the one that is known."""

    def know(contender: StubContender) -> None:
        for module in (experiment, calibration):
            monkeypatch.setattr(module, "CONTENDERS", {"stub": contender})

    return know


def stubbed(folder: Path) -> tuple[Experiment, ResultStore]:
    store = ResultStore(folder, STUBBED)
    found = Calibration(ALONE_S, {"stub": 40.0}, {})
    return Experiment(folder, STUBBED, found, store, ["a circle"]), store


def test_block_is_run_and_another_process_goes_on_after_it(
    tmp_path: Path, stub: Callable[[StubContender], None]
) -> None:
    stub(StubContender())
    drawn = traces(STUBBED, rate_per_s=40.0)
    run, store = stubbed(tmp_path)
    first, *rest = missing_blocks(STUBBED, drawn, store)
    run.run(first, lambda _done, _text: None)
    again = ResultStore(tmp_path, STUBBED)
    assert [block.name for block in missing_blocks(STUBBED, drawn, again)] == [
        block.name for block in rest
    ]
    refused = sum(one.seed % 7 == 6 for one in first.trace.requests)
    assert refused > 0
    for cell in first.cells:
        found = again[cell]
        assert found["fates"]["refused"] == refused
        assert found["fates"]["in time"] == 20 - refused
        assert found["accounts"]["nothing_lost"]
        assert found["accounts"]["client_and_service"]["accepted"] == [20 - refused] * 2
        assert found["client_cpu_share"] > 0
    images = list((tmp_path / "images" / first.trace.name / "stub").glob("*.png"))
    assert len(images) == 20 - refused


def test_call_leaves_out_what_the_contender_omits() -> None:
    contender = StubContender(call={"when_late": "accept"}, omits=("slo_s",))
    [trace, *_] = traces(STUBBED)
    body = call_body(contender, trace.requests[0])
    assert body["when_late"] == "accept"
    assert body["size"] == trace.requests[0].shape.size
    assert "slo_s" not in body
    assert "slo_s" in call_body(StubContender(), trace.requests[0])


def test_service_whose_counts_never_settle_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: Callable[[StubContender], None]
) -> None:
    stub(StubContender(forgets=1000))
    monkeypatch.setattr(experiment, "_SETTLE_S", 0.3)
    run, store = stubbed(tmp_path)
    [block, *_] = missing_blocks(STUBBED, traces(STUBBED, rate_per_s=40.0), store)
    run.run(replace(block, cells=block.cells[:1]), lambda _done, _text: None)
    assert not store[block.cells[0]]["accounts"]["nothing_lost"]


def test_images_alone_are_measured_for_every_shape(tmp_path: Path) -> None:
    with running(StubContender(), dtype="float32", alone_s={}, log=tmp_path / "log") as url:
        found = measure_alone(url, STUBBED, ["a circle"])
    assert set(found) == set(ALONE_S)
    assert all(work_s == 0.001 for work_s in found.values())


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
