"""What experiment files may say is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from ray_cluster.simulator import autoscaling_policies, cascade_policies
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment, Workload
from ray_cluster.simulator.cascade_experiment import CascadeExperiment
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_policies import KNOWN
from ray_cluster.simulator.sizing import Device, SizingTask
from ray_cluster.simulator.sp_experiment import BOUND
from ray_cluster.simulator.sp_file import SpFile
from ray_cluster.simulator.sp_tuning import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
EXPERIMENTS, PLANS = PAGE.split("## How many replicas")
KINDS, PROTOCOL = EXPERIMENTS.split("## Protocol")
FIRST, CELL, GROUPS, CASCADE, DAY = re.split(r"^## `kind: .*", KINDS, flags=re.MULTILINE)
SCHEMAS = [
    (CellExperiment, CELL),
    (SpFile, GROUPS),
    (CascadeExperiment, CASCADE),
    (AutoscalingExperiment, DAY),
    (Workload, DAY),
]


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]


def named(text: str) -> set[str]:
    """What stands in the first column of tables."""
    return {name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(("schema", "section"), SCHEMAS)
def test_every_key_is_described_with_its_default(schema: type[BaseModel], section: str) -> None:
    table = {name: row for row in rows(FIRST + section) for name in re.findall(r"`(.+?)`", row[0])}
    for key, field in schema.model_fields.items():
        assert key in table, key
        if isinstance(field.default, int | float):
            default = str(field.default).lower().removesuffix(".0")
            assert default in re.split(r"[,;]? ", table[key][2]), key


def test_every_kind_is_named() -> None:
    kinds = {schema.model_fields["kind"].annotation for schema, _ in SCHEMAS[:-1]}
    (row,) = [row for row in rows(FIRST) if row[0] == "`kind`"]
    assert set(re.findall(r"`([^`]+)`", row[1])) == {get_args(one)[0] for one in kinds}


def test_every_key_of_a_task_is_described() -> None:
    assert set(SizingTask.model_fields) <= named(PLANS)
    for key in Device.model_fields:
        assert f"`{key}`" in PLANS


def test_every_policy_is_described() -> None:
    assert set(KNOWN) <= named(CELL)
    assert {*FAMILIES, BOUND, "rounds/most", "rounds/large", "widest", "moldable"} <= named(GROUPS)
    assert {one.name for one in cascade_policies.POLICIES} <= named(CASCADE)
    assert {one.name for one in autoscaling_policies.POLICIES} <= named(DAY)


def test_every_experiment_is_listed() -> None:
    files = {
        path.stem for path in (Path(__file__).parents[2] / "benchmarks/policies").glob("*.yaml")
    }
    listed = set()
    for row in rows(PROTOCOL):
        first, *others = (name.removesuffix(".yaml") for name in re.findall(r"`([^`]+)`", row[0]))
        # a name that begins with a dash goes on where the part before it ends
        stem = first if first in ("cascade", "autoscaling") else "sp-table-a"
        listed |= {first, *(stem + one if one.startswith("-") else one for one in others)}
    assert files == listed
