"""What experiment files may say is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast, get_args

import pytest
from pydantic import BaseModel

from ray_cluster.policies.leasing.controlnet_peers import patience_s
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.cell.experiment import CellExperiment, CellPool, SizeShare
from ray_cluster.simulator.cell.policies import KNOWN
from ray_cluster.simulator.control.autoscaling import AutoscalingExperiment, Workload
from ray_cluster.simulator.controlnets.add_ons import MIXES, AddOnCost, MixName, Way
from ray_cluster.simulator.groups.experiment import BOUND, FAMILIES, SpExperiment
from ray_cluster.simulator.sizing import CascadeSizingTask, Device, SizingTask
from ray_cluster.simulator.traces import TraceRow

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
EXPERIMENTS, PLANS = PAGE.split("## How many replicas")
KINDS, PROTOCOL = EXPERIMENTS.split("## Protocol")
FIRST, CELL, GROUPS, CASCADE, DAY = re.split(r"^## `kind: .*", KINDS, flags=re.MULTILINE)
KEYS, TRACES, ADD_ONS, SERVICES = re.split(r"^### .*", CELL, flags=re.MULTILINE)
SCHEMAS = [
    (CellExperiment, KEYS),
    (SizeShare, KEYS),
    (CellPool, KEYS),
    (SpExperiment, GROUPS),
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
    paragraphs = re.split(r"\n(?=\||\n)", FIRST + section)
    for key, field in schema.model_fields.items():
        found = [one for one in paragraphs if f"`{key}`" in one]
        assert found, key
        if isinstance(field.default, int | float):
            default = str(field.default).lower().removesuffix(".0")
            assert any(default in re.split(r"[,;()]? |[()]", one) for one in found), key


def test_every_kind_is_named() -> None:
    kinds = {
        schema.model_fields["kind"].annotation
        for schema, _ in SCHEMAS
        if "kind" in schema.model_fields
    }
    (row,) = [row for row in rows(FIRST) if row[0] == "`kind`"]
    assert set(re.findall(r"`([^`]+)`", row[1])) == {get_args(one)[0] for one in kinds}


def test_every_column_of_a_trace_is_described() -> None:
    table = {name: row for row in rows(TRACES) for name in re.findall(r"`(.+?)`", row[0])}
    assert set(table) == set(TraceRow.model_fields)
    for key, field in TraceRow.model_fields.items():
        assert field.is_required() == (table[key][-1] == ""), key


def test_what_add_ons_cost_is_what_is_described() -> None:
    assert named(ADD_ONS) - {"add_ons"} == set(MIXES) - {"none"}
    for row in rows(ADD_ONS)[1:]:
        mix = MIXES[cast(MixName, row[0].strip("`"))]
        for add_ons, cell in zip((mix.controlnets, mix.loras), row[1:], strict=True):
            if add_ons is None:
                assert cell == "none"
                continue
            shares = [float(one) / 100 for one in cell.split(" %")[0].split(",")]
            given = [*add_ons.count_shares, *(0.0,) * (len(shares) - len(add_ons.count_shares))]
            assert shares == pytest.approx(given)
            assert cell.endswith(f"of {add_ons.num_distinct}")
    cost = AddOnCost()
    for figure in (
        f"takes {cost.controlnet_share:.3f} of",
        f"{cost.controlnet_fetch_s:g} s for a",
        f"{cost.lora_fetch_s:.2f} s for a LoRA",
    ):
        assert figure in " ".join(ADD_ONS.split()), figure


def test_when_rows_are_cut_is_what_is_described() -> None:
    words = " ".join(SERVICES.split())
    least_s, of_all_s = patience_s(0.0, all_wait=False), patience_s(0.0, all_wait=True)
    usual = patience_s(1.0, all_wait=True)
    assert f"later than {1e3 * least_s:g} ms and three usual answers ({1e3 * of_all_s:g}" in words
    assert usual == 3
    share = AddOnCost().controlnet_share / Way().half_share
    assert f"first half (1/{share:g} of what a ControlNet takes)" in words


def test_every_key_of_a_task_is_described() -> None:
    own = {
        key
        for key, field in CascadeSizingTask.model_fields.items()
        if repr(field) != repr(CascadeExperiment.model_fields.get(key))
    }
    assert {"most_violations", "worst_quality", "most_gpus", "what"} <= own
    for key in {*SizingTask.model_fields, *own, *Device.model_fields}:
        assert f"`{key}`" in PLANS, key


def test_every_policy_is_described() -> None:
    groups = {*FAMILIES, BOUND, "rounds/most", "rounds/large", "widest", "moldable"}
    cascades, days = (
        {one.name for one in kind.POLICIES} for kind in (CascadeExperiment, AutoscalingExperiment)
    )
    for names, section in ((KNOWN, CELL), (groups, GROUPS), (cascades, CASCADE), (days, DAY)):
        for name in names:
            assert f"`{name}`" in section, name
