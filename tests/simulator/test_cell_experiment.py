"""Experiments compare policies on equal arrivals, and report what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_cluster.errors import ConfigError
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.types import StepCost
from ray_cluster.simulator.cell.experiment import CellExperiment
from ray_cluster.simulator.cell.policies import KNOWN
from ray_cluster.simulator.cell.report import report_cells
from ray_cluster.simulator.cell.runs import Setting, run_cell, with_batching_gain
from ray_cluster.simulator.experiments import load_experiment
from ray_cluster.simulator.reports import Report
from tests.fakes import request_view

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "policies").glob("*.yaml"))
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


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in SMALL.items() if name != key}


def pools(*given: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in SMALL.items() if key not in ("replicas", "max_batch")}
    return {**{key: value for key, value in kept.items() if key != "profile"}, "pools": given}


def sizes(*given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes, "sizes": [{"width": 512, "height": 512, **one} for one in given]}


def small(**changes: Any) -> CellExperiment:
    return CellExperiment.model_validate({**SMALL, **changes})


def test_every_policy_sees_the_same_arrivals_and_a_run_repeats_itself() -> None:
    experiment = small(rates_per_s=[6])
    rows = [run_cell(experiment, run) for run in experiment.runs()]
    assert len(rows) == 8
    assert {(row.seed, len(row.met)) for row in rows} == {
        (seed, len(Setting.of(experiment).workload(6, seed))) for seed in (0, 1)
    }
    assert rows[0] == run_cell(experiment, next(iter(experiment.runs())))
    for row in rows:
        assert len(row.met) == len(row.admitted)
        assert row.met.count("1") == pytest.approx(row.figures["attainment"] * len(row.met))
        late = sum(a == "1" and b == "0" for a, b in zip(row.admitted, row.met, strict=True))
        assert late == pytest.approx(row.figures["broken"] * row.admitted.count("1"))


@pytest.mark.parametrize(
    "name", [*KNOWN[:5], "static/3", "static/3/0.5", "turns", "fewer/9", "slack/0.2"]
)
def test_every_policy_can_be_named(name: str) -> None:
    experiment = small(policies=[name], rates_per_s=[2], num_seeds=1, duration_s=4)
    (row,) = (run_cell(experiment, run) for run in experiment.runs())
    assert 0 <= row.figures["attainment"] <= 1


NO_POLICIES = (
    *("deadlines", "static", "static/x", "static/0", "static/-1", "static/4/inf", "static/4/-3"),
    *(
        "static/4/nan",
        "static/1_0",
        "static/ 4",
        "static/٣",
        "fcfs/2",
        "fewer/0",
        "slack/1/2",
        "slack/nan",
        "",
    ),
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
        run_cell(one, next(iter(one.runs()))).figures["attainment"]
        for one in (unasked, strict, asked)
    ]
    assert attained[:2] == [0, 0]
    assert attained[2] > 0.9


def test_the_report_says_simulated_and_compares_pairs() -> None:
    report = reported(small())
    assert "Simulated, modelled times" in report.what
    assert "2 as sdxl-h100" in report.what
    assert all("simulated" in table.title for table in report.tables)
    assert report.figures["profile_kinds"] == ["modelled"]
    cells = {(one["policy"], one["rate_per_s"]): one for one in report.figures["cells"]}
    assert len(cells) == 8
    busy, alone = cells["deadline", 12.0], cells["fcfs", 12.0]
    assert busy["attainment"]["num"] == 2
    assert busy["attainment"]["value"] > alone["attainment"]["value"] + 0.3
    assert busy["refused"]["value"] > 0.1
    plot, by_class, _ = report.plots
    (lines,), (class_lines,) = plot.panels.values(), by_class.panels.values()
    assert list(lines["fcfs"].x) == [2.0, 12.0]
    assert lines["fcfs"].y == pytest.approx(
        [100 * cells["fcfs", rate]["attainment"]["value"] for rate in (2.0, 12.0)]
    )
    assert list(class_lines) == ["512x512", "1024x1024"]
    assert class_lines["512x512"].y[1] == pytest.approx(100 * busy["by_class"]["512x512"]["value"])


def reported(experiment: CellExperiment) -> Report:
    rows = [run_cell(experiment, run) for run in experiment.runs()]
    return report_cells(Setting.of(experiment), rows)


def test_false_refusals_are_shown_as_shares_of_the_arrivals_and_of_the_refused() -> None:
    report = reported(small(policies=["deadline", "deadline/open"]))
    table = next(one for one in report.tables if one.title.startswith("Refusals"))
    quiet, busy = table.rows
    assert len(table.columns) == len(busy) == 5
    assert quiet[-1] == ""
    refused, false, share = (float(busy[n].split(" ")[0]) for n in (1, 3, 4))
    assert 0 < false < refused < 100
    # means over seeds of ratios are about the ratio of the means
    assert share == pytest.approx(100 * false / refused, rel=0.3)
    alone = reported(small(policies=["deadline"], rates_per_s=[12]))
    assert [len(one.columns) for one in alone.tables] == [2, 4, 3]
    assert not any("gains" in one.title for one in alone.tables)
    without = reported(small(policies=["fcfs"], rates_per_s=[2]))
    assert not any("Refusals" in one.title for one in without.tables)


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
    experiment = small(num_seeds=1, policies=["deadline"]).model_copy(
        update={"rates_per_s": (1e-6,)}
    )
    row = run_cell(experiment, next(iter(experiment.runs())))
    assert (row.met, row.figures) == ("", {"attainment": 1.0, "refused": 0.0, "broken": 0.0})


def written(path: Path, content: Any) -> Path:
    file = path / "experiment.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_files_of_the_benchmarks_can_be_run(path: Path) -> None:
    job, content = load_experiment(path), yaml.safe_load(path.read_text())
    num_seeds, num_policies = content.get("num_seeds", 30), len(content["policies"])
    num = {
        "cell": num_policies * len(content.get("rates_per_s", content.get("speeds", ()))),
        # of two mixes; all policies are a part
        "sequence-parallel": 2
        * len(content.get("scales", ()))
        * len(content.get("rates_per_min", ())),
    }
    assert job.name == path.stem
    assert len(job.parts) == num_seeds * num.get(content["kind"], num_policies)


def test_an_experiments_file_becomes_parts_and_fewer_seeds_on_request(tmp_path: Path) -> None:
    job = load_experiment(written(tmp_path, SMALL))
    assert (job.name, len(job.parts)) == ("small", 2 * 2 * 4)
    assert len(load_experiment(written(tmp_path, SMALL), num_seeds=1).parts) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: [", "cannot read"),
        ("- 1", "must hold keys and values; given a list"),
        ({**SMALL, "kind": "cells"}, "kind: given 'cells'; allowed: cell"),
        ({**SMALL, "policies": ["best"]}, "there is no policy 'best'"),
        ({**SMALL, "profile": "h100"}, "there is no profile 'h100'"),
        ({**SMALL, "batching_gain": 9}, "batching gain of 9"),
        ({**SMALL, "policies": ["fcfs", "fcfs"]}, "policies"),
        ({**SMALL, "fewest_steps": 21}, "fewest_steps"),
        ({**SMALL, "rates_per_s": [1e6], "duration_s": 1e4}, "10,000,000,000 a run"),
        ({**SMALL, "rates_per_s": [1e-4]}, "0 a run; allowed: 5 to"),
        ({**SMALL, "one_way_s": 0.9}, "one_way_s: .*at most 0.5"),
        ({**SMALL, "policies": ["static/99999999999"]}, "there is no policy 'static/99999999999'"),
        ({**SMALL, "policies": ["static/4/1e9"]}, "there is no policy 'static/4/1e9'"),
        ({**SMALL, "sizes": [{"width": 64, "height": 64, "share": 1e308}]}, "share"),
        ({**SMALL, "sizes": [{"width": 64, "height": 64, "slo_class": "a\x1b[2J"}]}, "slo_class"),
        ("kind: cell\nreplicas: 8\nreplicas: 2", "the key 'replicas' is there twice"),
        ("a: &a [x, x]\nkind: [*a, *a, *a, *a, *a, *a]", "kind: given"),
        ("kind: cell\nwhat: 2020-99-99", "cannot read"),
        ("kind: " + "[" * 5000, "nested too deeply"),
        ({**SMALL, "profile": "flux-h100-a"}, "has no steps on one device"),
        ({**SMALL, "night": 1.5}, "night: .*at most 1 .given 1.5"),
        ({**SMALL, "add_ons": "service-c"}, "add_ons: .*'service-a'.*given 'service-c'"),
        ({**SMALL, "mtbf_s": 5}, "mtbf_s: .*at least 10 .given 5"),
        ({**SMALL, "repair_s": 5}, "repair_s: given 5.0; allowed only with mtbf_s"),
        ({**SMALL, "speeds": [2]}, r"speeds: given \[2.0\]; allowed only with a trace"),
        ({**SMALL, "model": "sdxl"}, "model: given 'sdxl'; allowed only with a trace"),
        ({**SMALL, "trace": "t.csv"}, "sizes: given .*; a trace says that itself"),
        ({**SMALL, "pools": [{"profile": "sdxl-h100"}]}, "profile: given 'sdxl-h100'; each of the"),
        (without("profile"), "profile: given none; a latency profile is needed, or pools"),
        (without("sizes"), "sizes: given none; at least one is needed, or a trace"),
        (without("rates_per_s"), "rates_per_s: given none"),
        (pools({"profile": "sdxl-h100", "times": 0}), "pools.0.times: .*given 0"),
        (pools({"profile": "a", "speed": 1}), "pools.0.speed: there is no such key.*allowed: prof"),
        (
            pools({"profile": "sdxl-h100"}, {"profile": "sd3-h100"}),
            "pools: given profiles of sd3 and sdxl; allowed are profiles of one model",
        ),
        (sizes({"slo_s": 3, "slo_times_alone": 2}), "slo_s or slo_times_alone; given 3 and 2"),
        (
            sizes({}, {"steps": 20, "slo_s": 3}),
            "sizes: given 512x512 twice; allowed are sizes that differ",
        ),
        (sizes({"steps": 10}, fewest_steps=15), "at most steps, 10 of 512x512; given 15"),
        (sizes({"stepz": 10}), "sizes.0.stepz: there is no such key; did you mean 'steps'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, content))
    with pytest.raises(ConfigError, match="cannot read"):
        load_experiment(tmp_path / "none.yaml")
