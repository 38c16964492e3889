import json
from pathlib import Path

import pytest

from benchmarks.serving.load import growth_aim, growth_row, slope_per_min
from tests.benchmarks.test_run import run


def test_slope_is_that_of_the_line_per_minute() -> None:
    samples = [(10.0 * index, 100 + 0.5 * index) for index in range(30)]
    slope, error = slope_per_min(samples)
    assert slope == pytest.approx(3.0)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_slope_of_noise_is_not_told_from_zero() -> None:
    samples = [(10.0 * index, 100 + (-1) ** index) for index in range(30)]
    slope, error = slope_per_min(samples)
    assert abs(slope) < 1.96 * error


def test_slope_needs_samples() -> None:
    with pytest.raises(ValueError, match="three samples"):
        slope_per_min([(0.0, 1.0), (1.0, 1.0)])


@pytest.mark.parametrize(("per_min", "verdict"), [(0.2, "yes"), (5.0, "no")])
def test_memory_that_grows_after_the_first_minute_misses_the_aim(
    per_min: float, verdict: str
) -> None:
    grown = [(10.0 * index, 100 + per_min * index / 6) for index in range(6, 30)]
    row = growth_row("gateway", [(0.0, 50.0), *grown], 300.0)
    assert row["per_min"]["value"] == pytest.approx(per_min)
    assert growth_aim(row).verdict == verdict


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_load_section_serves_all_clients_without_errors(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    done = run("--quick", "--only", "load", "--out", str(path), timeout_s=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    section = json.loads(path.read_text())["sections"]["load"]
    assert {row["calls"]: row["errors"] for row in section["tables"]["calls"]} == {
        "attached": {},
        "job": {},
    }
    for role in ("gateway", "dispatcher"):
        assert len(section["own_mib"][role]) >= 3
        assert min(size for _, size in section["own_mib"][role]) > 10
