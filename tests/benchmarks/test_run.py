import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.run import main

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout_s: float = 1700) -> subprocess.CompletedProcess[str]:
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
@pytest.mark.timeout(1800)
def test_quick_run_writes_valid_json_and_prints_tables(tmp_path: Path) -> None:
    path = tmp_path / "results" / "quick.json"
    names = {"engine", "overhead", "exports", "family", "kernels", "dispatcher"}
    done = run("--quick", "--only", ",".join(names), "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["quick"]
    assert {"machine", "commit", "versions", "load_before", "load_after"} <= result.keys()
    sections = result["sections"]
    assert set(sections) == names
    assert not any(section.get("problems") for section in sections.values())
    [cells, streams] = sections["engine"]["tables"].values()
    assert all(row["speed_up_cpu"]["median"] > 0 for row in (*cells, *streams))
    assert {row["way"] for row in cells} == {"engine", "static", "bare"}
    [family] = sections["family"]["tables"]["both models"]
    assert 0 < family["light_over_heavy"]["median"] < 0.5
    rows, capacity = sections["dispatcher"]["tables"].values()
    assert {(row["kind"], row["replicas"]) for row in rows} == {
        (kind, count) for kind in ("attached", "durable") for count in (1, 8)
    }
    assert all(row["requests"] > 0 and row["cpu_ms_per_request"] > 0 for row in rows)
    assert any(row["mean_queue"] > 20 for row in rows)
    assert all(row["gpus"] > 0 for row in capacity)
    assert "requests of one size" in done.stdout


def test_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "engine,nonsense"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "nonsense" in error
    assert "allowed: engine, sizes, overhead, exports, family, groups, kernels" in error
