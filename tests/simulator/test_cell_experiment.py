"""Experiments compare policies on equal arrivals, and report what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_cluster.errors import ConfigError
from ray_cluster.policies.cost_model import step_s, work_of
from ray_cluster.policies.types import StepCost
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_policies import KNOWN
from ray_cluster.simulator.cell_report import report_cells
from ray_cluster.simulator.cell_runs import Setting, run_cell, with_batching_gain
from ray_cluster.simulator.experiments import load_experiment
from tests.fakes import request_view

SMALL: dict[str, Any] = {
    "kind": "cell",
    "name": "small",
    "what": "Two replicas.",
    "profile": "sdxl-h100",
    "sizes": [{"width": 512, "height": 512}, {"width": 1024, "height": 1024, "share": 0.5}],
    "replicas": 2,
    "max_batch": 6,
    "steps": 20,
    "rates_per_s": [2, 12],
    "duration_s": 20,
    "policies": ["deadline", "deadline/open", "fcfs", "slack"],
    "first_seed": 0,
    "num_seeds": 2,
}


def small(**changes: Any) -> CellExperiment:
    return CellExperiment.model_validate({**SMALL, **changes})


def test_every_policy_sees_the_same_arrivals_and_a_run_repeats_itself() -> None:
    experiment = small(rates_per_s=[6])
    rows = [run_cell(experiment, run) for run in experiment.runs()]
    assert len(rows) == 8
    assert {(row.run.seed, row.num_arrivals) for row in rows} == {
        (seed, len(Setting.of(experiment).workload(6, seed))) for seed in (0, 1)
    }
    assert rows[0] == run_cell(experiment, rows[0].run)
    for row in rows:
        assert len(row.met) == len(row.let_in) == row.num_arrivals
        assert row.met.count("1") == pytest.approx(row.attainment * row.num_arrivals)
        late = sum(a == "1" and b == "0" for a, b in zip(row.let_in, row.met, strict=True))
        assert late == pytest.approx(row.broken * row.let_in.count("1"))


@pytest.mark.parametrize(
    "name", [*KNOWN[:4], "static/3", "static/3/0.5", "turns", "fewer/9", "slack/0.2"]
)
def test_every_policy_can_be_named(name: str) -> None:
    experiment = small(policies=[name], rates_per_s=[2], num_seeds=1, duration_s=4)
    (row,) = (run_cell(experiment, run) for run in experiment.runs())
    assert 0 <= row.attainment <= 1


NO_POLICIES = (
    *("deadlines", "static", "static/x", "static/0", "static/-1", "static/4/inf", "static/4/-3"),
    *("static/4/nan", "fcfs/2", "fewer/0", "slack/1/2", "slack/nan", ""),
)


@pytest.mark.parametrize("name", NO_POLICIES)
def test_a_policy_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no policy.*deadline.*slack/THRESHOLD"):
        small(policies=[name])


def test_fewer_steps_count_only_where_clients_put_up_with_them() -> None:
    unasked, strict, asked = (
        small(policies=["fewer/10"], rates_per_s=[1], num_seeds=1, fewest_steps=fewest)
        for fewest in (None, 11, 10)
    )
    attained = [
        run_cell(one, next(iter(one.runs()))).attainment for one in (unasked, strict, asked)
    ]
    assert attained[:2] == [0, 0]
    assert attained[2] > 0.9


def test_the_report_says_simulated_and_compares_pairs() -> None:
    experiment = small()
    report = report_cells(experiment, [run_cell(experiment, run) for run in experiment.runs()])
    assert "Simulated, modelled times (sdxl-h100" in report.what
    assert all("simulated" in table.title for table in report.tables)
    assert report.figures["profile_kinds"] == ["modelled"]
    cells = {(one["policy"], one["rate_per_s"]): one for one in report.figures["cells"]}
    assert len(cells) == 8
    busy, alone = cells["deadline", 12.0], cells["fcfs", 12.0]
    assert busy["attainment"]["num"] == 2
    assert busy["attainment"]["value"] > alone["attainment"]["value"] + 0.3
    assert busy["refused"]["value"] > 0.1
    (plot,) = report.plots
    assert list(plot.lines["fcfs"].x) == [2.0, 12.0]
    assert plot.lines["fcfs"].y == pytest.approx(
        [100 * cells["fcfs", rate]["attainment"]["value"] for rate in (2.0, 12.0)]
    )


def test_a_batching_gain_changes_what_batches_save_and_not_what_a_request_takes_alone() -> None:
    cost = StepCost(0.04, 0.02, per_squared_megapixel_s=0.01)
    examples = [request_view(f"{side}", width_px=side) for side in (512, 1024)]
    before_s = [step_s(cost, work_of([one])) for one in examples]
    for gain in (0.7, 1.3):
        changed = with_batching_gain(cost, examples, gain)
        assert changed.fixed_s == pytest.approx(gain * 0.04)
        after_s = [step_s(changed, work_of([one])) for one in examples]
        assert sum(after_s) == pytest.approx(sum(before_s))
        together_s = step_s(changed, work_of(examples))
        assert (together_s < step_s(cost, work_of(examples))) == (gain > 1)
    with pytest.raises(ValueError, match="at most"):
        with_batching_gain(cost, examples, 3.0)


def test_a_run_without_arrivals_refuses_nobody() -> None:
    experiment = small(rates_per_s=[1e-6], num_seeds=1, policies=["deadline"])
    row = run_cell(experiment, next(iter(experiment.runs())))
    assert (row.num_arrivals, row.attainment, row.refused, row.broken) == (0, 1.0, 0.0, 0.0)


def written(path: Path, content: Any) -> Path:
    file = path / "experiment.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def test_an_experiments_file_becomes_parts_and_fewer_seeds_on_request(tmp_path: Path) -> None:
    job = load_experiment(written(tmp_path, SMALL))
    assert (job.name, len(job.parts)) == ("small", 2 * 2 * 4)
    assert len(load_experiment(written(tmp_path, SMALL), num_seeds=1).parts) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: [", "cannot read"),
        ("- 1", "must hold keys and values; given \\[1\\]"),
        ({**SMALL, "kind": "cells"}, "kind: given 'cells'; allowed: cell"),
        ({**SMALL, "replicas": 0}, "replicas"),
        ({**SMALL, "speed": 3}, "speed"),
        ({**SMALL, "policies": ["best"]}, "there is no policy 'best'"),
        ({**SMALL, "profile": "h100"}, "there is no profile 'h100'"),
        ({**SMALL, "batching_gain": 9}, "batching gain of 9"),
        ({**SMALL, "rates_per_s": [2, 2]}, "rates_per_s"),
        ({**SMALL, "policies": ["fcfs", "fcfs"]}, "policies"),
        ({**SMALL, "fewest_steps": 21}, "fewest_steps"),
        ({**SMALL, "rates_per_s": [1e6], "duration_s": 1e4}, "10,000,000,000 a run"),
        ({**SMALL, "duration_s": 1e15}, "duration_s"),
        ("kind: [cell]", "kind: given"),
        ("kind: cell\nwhat: 2020-99-99", "cannot read"),
        ("kind: " + "[" * 5000, "nested too deeply"),
        ({**SMALL, "profile": "flux-h100-a"}, "has no steps on one device"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, content))
    with pytest.raises(ConfigError, match="cannot read"):
        load_experiment(tmp_path / "none.yaml")
