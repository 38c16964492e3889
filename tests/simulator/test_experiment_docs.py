"""What experiment files may say is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_policies import KNOWN
from ray_cluster.simulator.sizing import Device, SizingTask
from ray_cluster.simulator.sp_experiment import BOUND
from ray_cluster.simulator.sp_file import SpFile
from ray_cluster.simulator.sp_tuning import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
EXPERIMENTS, PLANS = PAGE.split("## How many replicas")
FIRST, CELL, GROUPS = re.split(r"^## `kind: .*", EXPERIMENTS, flags=re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]


def named(text: str) -> set[str]:
    """What stands in the first column of tables."""
    return {name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(("schema", "section"), [(CellExperiment, CELL), (SpFile, GROUPS)])
def test_every_key_is_described_with_its_default(schema: type[BaseModel], section: str) -> None:
    table = {name: row for row in rows(FIRST + section) for name in re.findall(r"`(.+?)`", row[0])}
    for key, field in schema.model_fields.items():
        assert key in table, key
        if isinstance(field.default, int | float):
            assert str(field.default).lower().removesuffix(".0") in table[key][2], key


def test_every_key_of_a_task_is_described() -> None:
    assert set(SizingTask.model_fields) <= named(PLANS)
    for key in Device.model_fields:
        assert f"`{key}`" in PLANS


def test_every_policy_is_described() -> None:
    assert set(KNOWN) <= named(CELL)
    assert {*FAMILIES, BOUND, "rounds/most", "rounds/large", "widest", "moldable"} <= named(GROUPS)


def test_every_experiment_is_listed() -> None:
    files = {
        path.stem for path in (Path(__file__).parents[2] / "benchmarks/policies").glob("*.yaml")
    }
    listed = {name.removesuffix(".yaml") for name in named(GROUPS.split("## Protocol")[1])}
    full = {f"sp-table-a{name}" if name.startswith("-") else name for name in listed}
    assert files == full
