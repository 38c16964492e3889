"""Each section runs in its quick form, and nothing is wrong in it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run import SECTIONS, main

ROOT = Path(__file__).resolve().parents[2]
_SERVED = {
    *("service", "load", "cascade", "loras", "controlnets", "floods", "flooded-plans"),
    *("controller", "controller-turns", "compare"),
}
# of the parts of the service the same program is run, on more contenders
_ALONE = SECTIONS.keys() - _SERVED - {"compare-parts", "groups-skewed"}


def quick(path: Path, *names: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--only", ",".join(names)]
    done = subprocess.run(
        [*command, "--out", str(path)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "130"},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    result = json.loads(path.read_text())
    assert result["quick"]
    assert {"machine", "commit", "versions", "load_before", "load_after"} <= result.keys()
    assert set(result["sections"]) == set(names)
    for name in names:
        assert result["sections"][name]["what"]
        assert all(result["sections"][name]["tables"].values())
    assert "written: " in done.stdout
    found: dict[str, Any] = result["sections"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_quick_run_of_what_needs_no_service(tmp_path: Path) -> None:
    path = tmp_path / "results" / "quick.json"
    sections = quick(path, *sorted(_ALONE))
    assert path.with_suffix(".png").is_file()
    [cells, streams] = sections["engine"]["tables"].values()
    assert all(row["speed_up"]["median"] > 0 for row in (*cells, *streams))
    assert {row["by"] for row in cells} == {"one by one", "engine", "static", "bare"}
    rows = sections["family"]["tables"]["both models"]
    assert rows[1]["speed_up"]["median"] > 2
    rows, capacity = sections["dispatcher"]["tables"].values()
    assert all(row["requests"] > 0 and row["cpu_ms_per_request"] > 0 for row in rows)
    assert any(row["mean_queue"] > 20 for row in rows)
    assert all(row["gpus"] > 0 for row in capacity)
    links = {row["by"] for row in sections["transport"]["tables"]["round trips"]}
    assert len(links) == 3
    assert len(sections["groups-uniform"]["tables"]["attainment, uniform"]) == 7


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(_SERVED))
def test_a_quick_run_of_a_service(tmp_path: Path, name: str) -> None:
    found = quick(tmp_path / "quick.json", name)[name]
    if name == "load":
        assert [row["errors"] for row in found["tables"]["calls"]] == [{}, {}]
        assert min(size for _, size in found["own_mib"]["gateway"]) > 10
    if name == "controller":
        assert all(row["done"] == row["count"] for row in found["tables"]["reshapes"])


def test_an_unknown_section_is_refused_and_patterns_name_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "engine,nonsense"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "nonsense" in error
    assert "allowed: engine, sizes, overhead, exports, family, groups, kernels" in error
    path = tmp_path / "out.json"
    assert main(["--quick", "--only", "trans*", "--out", str(path)]) == 0
    [(name, section)] = json.loads(path.read_text())["sections"].items()
    assert name == "transport"
    assert {row["KiB"] for row in section["tables"]["round trips"]} == {108, 4096}
