"""Every op is measured, and a wrong result has no speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.kernels.cases import Case, cases_of, cpu_sizes
from benchmarks.kernels.section import largest_difference, measure_case, measure_kernels
from benchmarks.report import print_report
from benchmarks.settings import quick_settings

ROOT = Path(__file__).resolve().parents[2]
FEW = replace(quick_settings(), kernel_rounds=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_every_op_equals_its_naive_composition_and_is_timed_beside_a_copy() -> None:
    said: list[float] = []
    section = measure_kernels(FEW, lambda done, text: said.append(done))
    assert said == sorted(said)
    assert {row["op"] for row in section["rows"]} == {
        path.parent.name for path in (ROOT / "kernels").glob("*/op.py")
    }
    for row in section["rows"]:
        assert [one["kind"] for one in row["contenders"]] == ["naive", "reference", "copy"]
        assert all(one["speed_up"]["median"] > 0 for one in row["contenders"])
        assert row["contenders"][2]["share_of_copy"]["median"] == 1
    console = Console(record=True, width=200)
    sections = {"kernels": json.loads(json.dumps(section, allow_nan=False))}
    print_report(console, {"sections": sections, "quick": True})
    assert "over naive" in console.export_text()


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_a_wrong_result_gets_neither_ratio_nor_rate(wrong: float) -> None:
    case: Case = next(case for case in cases_of(cpu_sizes()) if case.op == "geglu")
    right = case.naive()
    row = measure_case(replace(case, naive=lambda: right * wrong), "cpu", 1, 1e-4)
    by_kind = {one["kind"]: one for one in row["contenders"]}
    assert "speed_up" not in by_kind["naive"]
    assert "bytes_per_s" not in by_kind["naive"]
    assert "bytes_per_s" in by_kind["reference"]
    json.dumps(row, allow_nan=False)


def test_a_difference_is_that_of_the_worst_result() -> None:
    small, large = torch.tensor([0.0, 0.5]), torch.tensor([4.0, 8.0])
    assert largest_difference((small, large), (small, large)) == 0
    assert largest_difference(large + 1, large) == pytest.approx(1 / 4)
    assert largest_difference((small + 0.75, large + 1), (small, large)) == pytest.approx(0.75)
