"""Files about sequence-parallel groups become experiments, and their rows become reports."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.errors import ConfigError
from ray_cluster.simulator.experiments import load_experiment
from ray_cluster.simulator.groups.experiment import SHOWN_S, run_tasks, run_unit, units_of
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.groups.report import _timeline
from ray_cluster.simulator.reports import Report
from tests.simulator.group_rules import sp_experiment
from tests.simulator.test_cell_experiment import written

SMALL: dict[str, Any] = {
    "kind": "sequence-parallel",
    "name": "small",
    "what": "Eight GPUs.",
    "profile": "flux-h100-a",
    "mixes": ["uniform"],
    "rates_per_min": [12, 30],
    "scales": [1.0, 1.5],
    "policies": ["rounds/most", "rounds/large", "best_static", "bound"],
    "choices": "chosen/choices.json",
    "num_arrivals": 12,
    "first_seed": 0,
    "num_seeds": 2,
}


def choices(folder: Path, **changes: Any) -> Path:
    """Write a choices file that knows the cells of the small experiment."""
    (folder / "chosen").mkdir(exist_ok=True)
    path = folder / "chosen" / "choices.json"
    rows = [
        {
            "profile": "flux-h100-a",
            "family": "best_static",
            "cell": {"mix": "uniform", "rate_per_min": rate, "scale": scale},
            "policy": f"static/8-8-8-8/{'edf' if scale == 1.0 else 'fcfs'}",
            "attainment": 90.0,
            "num_tried": 288,
            **changes,
        }
        for rate in (12.0, 30.0)
        for scale in (1.0, 1.5)
    ]
    path.write_text(json.dumps(rows))
    return path


def report_of(folder: Path, **changes: Any) -> Report:
    choices(folder)
    job = load_experiment(written(folder, {**SMALL, **changes}))
    # as another process gets them
    return job.sum_up([pickle.loads(pickle.dumps(part))() for part in job.parts])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(tmp_path_factory.mktemp("small"))


def table(report: Report, title: str) -> list[list[str]]:
    (found,) = (one for one in report.tables if title in one.title)
    return [list(found.columns), *map(list, found.rows)]


def test_parts_are_a_workload_each(tmp_path: Path) -> None:
    choices(tmp_path)
    job = load_experiment(written(tmp_path, SMALL))
    assert (job.name, len(job.parts)) == ("small", 2 * 2 * 2)
    assert len(load_experiment(written(tmp_path, SMALL), num_seeds=1).parts) == 2 * 2


def test_everything_says_simulated_and_on_what_times(report: Report) -> None:
    assert "Simulated, modelled times (flux-h100-a)" in report.what
    assert "dropped or late is missed" in report.what
    titles = [one.title for one in (*report.tables, *report.plots, report.timeline)]
    assert len(titles) == 4 * 2 + (2 + 2 + 1) + 1
    assert all("simulated" in title for title in titles)
    assert report.figures["profile_kinds"] == ["modelled"]


def test_figures_hold_every_seed_and_what_a_tuned_policy_stands_for(report: Report) -> None:
    json.dumps(report.figures, allow_nan=False)
    cells = {
        (one["policy"], one["rate_per_min"], one["scale"]): one for one in report.figures["cells"]
    }
    assert len(cells) == 4 * 2 * 2
    assert cells["best_static", 12.0, 1.0]["stands_for"] == "static/8-8-8-8/edf"
    assert cells["best_static", 12.0, 1.5]["stands_for"] == "static/8-8-8-8/fcfs"
    for one in cells.values():
        assert len(one["samples"]) == one["attainment"]["num"] == 2
        assert sum(one["samples"]) / 2 == pytest.approx(one["attainment"]["value"], abs=1e-5)
    for rate in (12.0, 30.0):
        for scale in (1.0, 1.5):
            ours, bound = cells["rounds/most", rate, scale], cells["bound", rate, scale]
            pairs = zip(ours["samples"], bound["samples"], strict=True)
            assert all(mine <= most for mine, most in pairs)


def test_tables_say_what_the_figures_say(report: Report) -> None:
    loads = {(one["policy"], one["rate_per_min"]): one for one in report.figures["loads"]}
    for rate in (12.0, 30.0):
        header, *rows = table(report, f"uniform, {rate:g} per minute: on time, %, mean over")
        assert header == ["policy", "on time", "rounds/most gains"]
        assert [row[0] for row in rows] == SMALL["policies"]
        assert rows[0][2] == ""
        for policy, level, gain in rows[1:]:
            one = loads[policy, rate]
            assert level.startswith(f"{100 * one['attainment']['value']:.1f} ± ")
            assert gain.startswith(f"{100 * one['gain_of_first']['value']:.1f} ± ")
            ahead = loads["rounds/most", rate]["attainment"]["value"] - one["attainment"]["value"]
            assert one["gain_of_first"]["value"] == pytest.approx(ahead)
    header, *rows = table(report, "30 per minute: points that rounds/most gains")
    assert header == ["scale", "rounds/large", "best_static", "bound"]
    assert [row[0] for row in rows] == ["1", "1.5"]


def test_classes_are_shown_where_the_guard_and_the_static_baseline_can_be_compared(
    report: Report,
) -> None:
    header, *rows = table(report, "12 per minute: on time, %, by size")
    assert header == ["scale", "px", "rounds/most", "rounds/large", "best_static"]
    assert [row[:2] for row in rows] == [
        [scale, side] for scale in ("1", "1.5") for side in ("256", "512", "1024", "2048")
    ]


def test_plots_go_over_scales_and_sizes_and_where_there_are_several_over_rates(
    report: Report, tmp_path: Path
) -> None:
    plots = {one.name: one.panels["on time, %"] for one in report.plots}
    assert set(plots) == {
        *("uniform-12-per-min-scales", "uniform-30-per-min-scales", "uniform-rates"),
        *("uniform-12-per-min-sizes", "uniform-30-per-min-sizes"),
    }
    rates = plots["uniform-rates"]["rounds/most"]
    scales = plots["uniform-30-per-min-scales"]["rounds/most"]
    assert (rates.x, scales.x) == ([12.0, 30.0], [1.0, 1.5])
    # both have the larger scale and rate at their ends
    assert rates.y[-1] == scales.y[-1]
    assert plots["uniform-rates"]["bound"].y >= rates.y
    sizes = plots["uniform-12-per-min-sizes"]
    assert "bound" not in sizes
    assert set(sizes["best_static"].x) <= {256, 512, 1024, 2048}
    few = report_of(tmp_path, rates_per_min=[12], policies=["widest"], num_seeds=1)
    assert [one.name for one in few.plots] == [
        "uniform-12-per-min-scales",
        "uniform-12-per-min-sizes",
    ]
    assert not any("gains over" in one.title for one in few.tables)
    json.dumps(few.figures, allow_nan=False)


def test_the_timeline_is_the_beginning_of_the_first_policys_run() -> None:
    experiment = sp_experiment(num_arrivals=60, scales=[1.5], num_seeds=1)
    (unit,) = units_of(experiment, Path())
    tasks = experiment.tasks(unit.cell, unit.seed)
    assert tasks[-1].arrival_s > SHOWN_S + 60
    planner = planner_of("rounds/most", experiment.menus())
    whole = run_tasks(tasks, planner, num_gpus=8, switch_s=0.01, records=True)
    first, second = run_unit(unit)
    size_of = {one.request_id: f"{one.menu.slo_class} px" for one in tasks}
    timeline = _timeline(experiment, first)
    assert timeline.rows == [f"GPU {number}" for number in range(8)]
    assert len(timeline.bars) > 20
    assert [(one.row, one.begin_s, one.end_s, one.label) for one in timeline.bars] == [
        (gpu, one.begin_s, min(one.end_s, SHOWN_S), size_of[one.request_id])
        for one in whole.stretches
        if one.begin_s < SHOWN_S
        for gpu in one.gpus
    ]
    assert second.bars == ()
    assert timeline.title.startswith("rounds/most: which request has which GPU (simulated)")
    assert "seed 0" in timeline.title


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 3}, "speed: there is no such key; .*num_arrivals"),
        ({"scales": [1, 1.0]}, "scales: .*given twice: 1.0"),
        ({"mixes": ["even"]}, "mixes.0: .*'uniform' or 'skewed' .*'even'"),
        ({"cv": 3}, r"cv: .*at most 2 \(given 3\)"),
        ({"policies": ["bound", "widest"]}, "policies: .*'bound' is none"),
        ({"policies": ["widest", "best"]}, "policies: there is no policy 'best': choose rounds"),
        ({"policies": ["static/8-8/edf"]}, "policies: cannot read the policy 'static/8-8/edf'"),
        ({"policies": ["fixed/0"]}, "policies: .*'fixed/0': a degree: at least 1; given 0"),
        ({"policies": ["knapsack/0/grid"]}, "the steps of a round: at least 1; given 0"),
        ({"policies": ["best_fixed"]}, "policies: given 'best_fixed'.*allowed: the cells"),
        ({"scales": [1.0, 2.0]}, "'best_static'.*uniform, 12 per minute at a scale of 2"),
        ({"choices": None}, "'best_static', of which nothing was chosen"),
        ({"choices": "experiment.yaml"}, "the choices .*: Invalid JSON.*benchmarks/policies"),
        ({"profile": "sdxl-h100"}, "profile: given 'sdxl-h100', .*256, 512, 1024, 2048 px"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    choices(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, {**SMALL, **changes}))


def test_choices_that_are_none_are_refused_by_their_place(tmp_path: Path) -> None:
    path = choices(tmp_path, attainment="much")
    with pytest.raises(
        ConfigError, match=rf"{path}: 0.attainment: .*valid number.*benchmarks/policies"
    ):
        load_experiment(written(tmp_path, SMALL))
