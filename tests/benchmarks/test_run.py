import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout_s: float = 170) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "130"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
def test_quick_run_writes_valid_json_in_under_a_minute_of_cpu(tmp_path: Path) -> None:
    path = tmp_path / "results" / "quick.json"
    before = os.times()
    done = run("--quick", "--only", "engine,overhead,exports,family,kernels", "--out", str(path))
    after = os.times()
    assert done.returncode == 0, done.stderr
    # CPU and not wall time: other tests run beside this one
    used_s = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    assert used_s < 60
    result = json.loads(path.read_text())
    assert result["quick"]
    assert {"machine", "commit", "versions", "load_before", "load_after"} <= result.keys()
    assert set(result["sections"]) == {
        *("engine", "mixed_steps", "overhead", "exports", "family", "kernels")
    }
    rows = [row for cell in result["sections"]["engine"]["cells"] for row in cell["contenders"]]
    assert all(row["images_equal"] and row["speed_up_cpu"]["median"] > 0 for row in rows)
    assert all(case["plain_s"]["n"] > 0 for case in result["sections"]["overhead"]["cases"])
    assert 0 < result["sections"]["family"]["ratio"]["median"] < 0.5
    assert "Speed-up over the pipeline" in done.stdout


@pytest.mark.slow
def test_quick_dispatcher_section_counts_what_it_decides(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    done = run("--quick", "--only", "dispatcher", "--out", str(path))
    assert done.returncode == 0, done.stderr
    section = json.loads(path.read_text())["sections"]["dispatcher"]
    assert {(row["kind"], row["replicas"]) for row in section["rows"]} == {
        (kind, count) for kind in ("attached", "durable") for count in (1, 8)
    }
    for row in section["rows"]:
        assert row["requests"] > 0
        assert row["cpu_ms_per_request"] > 0
        assert 0 < row["fakes_share"] < 0.5
    assert any(row["mean_queue"] > 20 for row in section["rows"])
    assert all(row["gpus"] > 0 for row in section["capacity"])
    assert "GPUs in a cell" in done.stdout
    assert (tmp_path / "quick-dispatcher.png").stat().st_size > 1000


def test_unknown_section_is_refused_before_anything_is_loaded() -> None:
    started_s = time.monotonic()
    done = run("--only", "engine,nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    allowed = "engine, sizes, overhead, exports, family, kernels, dispatcher, service, memory, load"
    assert f"allowed: {allowed}" in done.stderr
    assert time.monotonic() - started_s < 60
