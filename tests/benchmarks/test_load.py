import json
from pathlib import Path

import pytest

from benchmarks.aims import check_aims
from benchmarks.serving.load import MAX_SLOPE_MIB_PER_MIN, slope_per_min
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


@pytest.mark.parametrize(("slope", "verdict"), [(0.2, "yes"), (5.0, "no")])
def test_growing_memory_misses_the_aim(slope: float, verdict: str) -> None:
    row = {"slope_mib_per_min": slope, "slope_ci95": [slope - 0.1, slope + 0.1]}
    section = {
        "memory": {"gateway": row, "dispatcher": row},
        "max_slope_mib_per_min": MAX_SLOPE_MIB_PER_MIN,
    }
    assert [aim.verdict for aim in check_aims({"load": section})] == [verdict, verdict]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quick_load_section_serves_all_clients_without_errors(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    done = run("--quick", "--only", "load", "--out", str(path), timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    section = json.loads(path.read_text())["sections"]["load"]
    for kind in ("attached", "job"):
        assert section["kinds"][kind]["requests"] >= 32
        assert section["kinds"][kind]["errors"] == {}
    for role in ("gateway", "dispatcher"):
        assert len(section["memory"][role]["pss_mib"]) >= 3
        assert min(size for _, size in section["memory"][role]["pss_mib"]) > 10
    assert (tmp_path / "load-load.png").stat().st_size > 1000
