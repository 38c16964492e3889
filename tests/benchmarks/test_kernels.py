"""Every op is measured, and a wrong result has no speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Study
from benchmarks.kernels.cases import Case, cases_of, cpu_sizes
from benchmarks.kernels.section import largest_difference, measure, measure_case

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_every_op_equals_its_naive_composition_and_is_timed_beside_a_copy() -> None:
    progress: list[float] = []
    study = Study(quick=True, report=lambda done, text: progress.append(done))
    measure(study)
    assert progress == sorted(progress)
    rows = study.found["tables"]["ops"]
    assert {row["op"] for row in rows} == {
        path.parent.name for path in (ROOT / "kernels").glob("*/op.py")
    }
    assert [row["by"] for row in rows[:3]] == ["naive", "reference", "copy"]
    assert all(row["over_naive"]["median"] > 0 for row in rows)
    assert all(row["of_copy"]["median"] == 1 for row in rows if row["by"] == "copy")
    assert "problems" not in study.found


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_a_wrong_result_gets_neither_ratio_nor_rate(wrong: float) -> None:
    case: Case = next(case for case in cases_of(cpu_sizes()) if case.op == "geglu")
    right = case.naive()
    rows, problems = measure_case(replace(case, naive=lambda: right * wrong), cpu_sizes(), 1)
    found = {row["by"]: row for row in rows}
    assert "over_naive" not in found["naive"]
    assert "gb_per_s" not in found["naive"]
    assert "gb_per_s" in found["reference"]
    [problem] = problems
    assert "naive: differs" in problem


def test_a_difference_is_that_of_the_worst_result() -> None:
    small, large = torch.tensor([0.0, 0.5]), torch.tensor([4.0, 8.0])
    assert largest_difference((small, large), (small, large)) == 0
    assert largest_difference(large + 1, large) == pytest.approx(1 / 4)
    assert largest_difference((small + 0.75, large + 1), (small, large)) == pytest.approx(0.75)
