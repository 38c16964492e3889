"""Each section runs in its quick form, and nothing is wrong in it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from signal import SIGINT, raise_signal

import pytest

from benchmarks.run import SECTIONS, main

ROOT = Path(__file__).resolve().parents[2]
# these start Ray
_SERVED = {name for name, one in SECTIONS.items() if one.by.startswith("serving.")}
_NAMES = [
    pytest.param(name, marks=[pytest.mark.ray] if name in _SERVED else [])
    for name in SECTIONS
    # the same programs on more contenders, and on another mix
    if name not in {"compare-parts", "groups-skewed"}
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", _NAMES)
def test_a_quick_run_of_each_section(tmp_path: Path, name: str) -> None:
    path = tmp_path / "results" / "quick.json"
    words = [sys.executable, "-m", "benchmarks.run", "--quick", "--only", name, "--out", str(path)]
    more = {"cwd": ROOT, "env": os.environ | {"COLUMNS": "130"}, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **more) as process:
        try:
            said, _ = process.communicate(timeout=1700)
        except BaseException:
            # cut off: killed, it would leave the service that it has started
            process.terminate()
            process.communicate(timeout=90)
            raise
    assert process.returncode == 0, said[-9000:]
    assert "written: " in said
    result = json.loads(path.read_text())
    assert result["quick"]
    assert {"machine", "commit", "versions", "load_before", "load_after"} <= result.keys()
    found, tables = result["sections"][name], result["sections"][name]["tables"]
    assert all([found["what"], *tables.values()])
    match name:
        case "engine":
            assert {row["by"] for row in tables["requests of one size"]} == {
                *("one by one", "engine", "static", "bare")
            }
            assert all(row["speed_up"]["median"] > 0 for rows in tables.values() for row in rows)
        case "family":
            assert tables["both models"][1]["speed_up"]["median"] > 2
        case "dispatcher":
            rows, capacity = tables.values()
            assert all(row["requests"] > 0 and row["cpu_ms_per_request"] > 0 for row in rows)
            assert any(row["mean_queue"] > 20 for row in rows)
            assert all(row["gpus"] > 0 for row in capacity)
        case "load":
            assert [row["errors"] for row in tables["calls"]] == [{}, {}]
            assert min(size for _, size in found["own_mib"]["gateway"]) > 10
        case "controller":
            assert all(row["done"] == row["count"] for row in tables["reshapes"])
        case "transport":
            assert path.with_suffix(".png").is_file()


def test_an_unknown_section_is_refused_and_patterns_name_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--only", "engine,nonsense"])
    error = capsys.readouterr().err
    assert "['nonsense']; allowed: engine, sizes, overhead, family, groups, kernels" in error
    assert main(["--quick", "--only", "trans*", "--out", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    path = tmp_path / "out.json"
    assert main(["--quick", "--only", "trans*", "--out", str(path)]) == 0
    [(name, section)] = json.loads(path.read_text())["sections"].items()
    assert name == "transport"
    assert {row["KiB"] for row in section["tables"]["round trips"]} == {108, 4096}
    monkeypatch.setattr("benchmarks.transport.trips.measure", lambda _: raise_signal(SIGINT))
    assert main(["--quick", "--only", "trans*", "--out", str(path)]) == 1
    assert "stopped before its end" in path.read_text()
