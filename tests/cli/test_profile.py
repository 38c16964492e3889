"""``ray-cluster profile`` measures the real engine, and refuses what it cannot measure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ray_cluster.engine.batch.batch_caps import BatchCaps
from ray_cluster.engine.device.profiling import ProfilingPlan, planned_keys
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.costs.cost_fit import fit_step_cost, row_work
from ray_cluster.policies.costs.cost_model import TimedStep, further_size_s
from ray_cluster.policies.costs.latency import LatencyRow, OperationKey, SizeCount
from ray_cluster.simulator.cell.experiment import CellExperiment
from ray_cluster.simulator.cell.runs import Setting
from tests.cli.conftest import Cli

CELL = {
    "kind": "cell",
    "name": "here",
    "what": "This machine.",
    "sizes": [{"width": 64, "height": 64}, {"width": 128, "height": 128}],
    "replicas": 1,
    "max_batch": 4,
    "steps": 4,
    "rates_per_s": [1],
    "duration_s": 5,
    "policies": ["deadline"],
}


def test_it_measures_what_it_is_asked_and_writes_a_profile(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    result = cli(
        *("profile", "--sizes", "64x64,128x128", "--batches", "4,1", "--repeats", 2, "-o", path)
    )
    assert result.exit_code == 0, result.output
    assert f"written: {path}" in result.stdout.replace("\n", "")
    profile = load_profile(path)
    assert (profile.model, profile.kinds) == ("shapes-sd", ("measured",))
    steps = profile.of("step")
    assert len([row for row in steps if not row.key.beside]) == 8
    assert {row.key for row in steps if row.key.beside} == {
        OperationKey("step", uses_guidance=guided).of_sizes(
            [SizeCount(64, 64, batch), SizeCount(128, 128, batch)]
        )
        for guided in (False, True)
        for batch in (1, 4)
    }
    assert len(profile.of("decode")) == 4
    assert len(profile.of("encode")) == 4
    assert len(profile.of("load")) == 1
    alone, together, large, guided = (
        profile.find(key)
        for key in (
            OperationKey("step", 64, 64),
            OperationKey("step", 64, 64, batch=4),
            OperationKey("step", 128, 128, batch=4),
            OperationKey("step", 64, 64, batch=4, uses_guidance=True),
        )
    )
    assert alone is not None
    assert together is not None
    assert large is not None
    assert guided is not None
    assert all(0 < row.seconds < 60 for row in profile.rows)
    # four times the pixels and twice the rows, beyond what the two runs of each differ by
    assert _range_s(large)[1] > _range_s(together)[0]
    assert _range_s(together)[0] < 4 * _range_s(alone)[1] * 2
    cost = fit_step_cost(profile).cost
    assert cost.source == "measured"
    assert cost.per_further_size_s == further_size_s(
        cost, [TimedStep(row_work(row), row.seconds) for row in steps]
    )
    # and that is what a simulated replica takes
    experiment = CellExperiment.model_validate(CELL | {"profile": str(path)})
    assert Setting.of(experiment).pools[0].cost == cost
    assert "step 64x64, batch 4, with 128x128, batch 4" in " ".join(result.stdout.split())


def _range_s(row: LatencyRow) -> tuple[float, float]:
    # what differs by less may be noise
    spread_s = row.seconds * (row.cv or 0.0)
    return row.seconds - spread_s, row.seconds + spread_s


def test_sizes_that_do_not_fit_together_are_not_measured_together() -> None:
    model = SimpleNamespace(
        profile=SimpleNamespace(guidance="none"),
        max_batch_by_size=BatchCaps({(64, 64): 8, (128, 128): 2}),
    )
    sizes = ((128, 128), (64, 64), (96, 96), (64, 128))
    keys = planned_keys(cast("LoadedModel", model), ProfilingPlan(sizes, (1, 2, 4)))
    found = [key.sizes for key in keys if key.beside]
    # three of them, one each: 1/8 + 1/2 + 1/2 of the room
    assert found == [(SizeCount(64, 64), SizeCount(128, 128))]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sizes", "64"], "'64' is none; write WIDTHxHEIGHT"),
        (["--sizes", "64x64,65x64"], "'65x64' is none"),
        (["--sizes", "64x9999"], "'64x9999' is none"),
        (["--batches", "0"], "whole numbers from 1 to 1024"),
        (["--batches", "1;2"], "whole numbers from 1 to 1024"),
        (["--out", "a.json"], "ends in .yaml"),
        (["--out", "nosuch/a.yaml"], "there is no folder"),
        (["--pool", "nosuch"], "nosuch"),
        (["--model", "nosuch"], "nosuch"),
    ],
)
def test_a_wrong_option_is_one_sentence(cli: Cli, arguments: list[str], sentence: str) -> None:
    result = cli("profile", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
