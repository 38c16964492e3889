"""Files about control loops become experiments, and their runs become reports."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ray_cluster.errors import ConfigError
from ray_cluster.policies.planning.cluster_state import ClusterState, DeviceState, PoolState
from ray_cluster.policies.planning.fleet import DeviceSpec, Fleet, PoolSpec
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.control.autoscaling import AutoscalingExperiment
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.report import gpu_timeline
from ray_cluster.simulator.experiments import load_experiment
from ray_cluster.simulator.reports import Bar, Report
from tests.simulator.control_files import CASCADE, DAY
from tests.simulator.test_cell_experiment import written

FOLDER = Path(__file__).parents[2] / "benchmarks" / "policies"
KINDS = {"cascade": CascadeExperiment, "autoscaling": AutoscalingExperiment}


def runs_of(job: Any) -> list[Any]:
    # as another process gets them
    return [pickle.loads(pickle.dumps(part))() for part in job.parts]


def report_of(folder: Path, content: dict[str, Any]) -> Report:
    job = load_experiment(written(folder, content))
    return job.sum_up(runs_of(job))


@pytest.fixture(scope="module")
def cascade_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """The experiment, and the runs of its parts."""
    job = load_experiment(written(tmp_path_factory.mktemp("cascade"), CASCADE))
    return job, runs_of(job)


@pytest.fixture(scope="module")
def cascade(cascade_runs: tuple[Any, list[Any]]) -> Report:
    job, runs = cascade_runs
    return job.sum_up(runs)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(tmp_path_factory.mktemp("day"), DAY)


def test_parts_are_a_policy_and_a_seed_each(tmp_path: Path) -> None:
    assert len(load_experiment(written(tmp_path, CASCADE)).parts) == 3 * 2
    assert len(load_experiment(written(tmp_path, DAY), num_seeds=5).parts) == 3 * 5


def test_only_what_is_shown_over_time_is_kept(cascade_runs: tuple[Any, list[Any]]) -> None:
    _, runs = cascade_runs
    assert [(row.policy, row.seed) for row in runs if row.course is not None] == [
        ("allocation", 0),
        ("diffserve", 0),
    ]


def test_everything_says_simulated_and_on_what_times(cascade: Report, day: Report) -> None:
    assert "Simulated, published times (sd-turbo-a100, sd15-a100)" in cascade.what
    assert "published times (sd15-a100) and modelled times (sdxl-h100)" in day.what
    assert cascade.figures["profile_kinds"] == ["published"]
    assert day.figures["profile_kinds"] == ["modelled", "published"]
    for report in (cascade, day):
        *tables, settings = report.tables
        shown = (*tables, *report.plots, report.timeline)
        assert len(shown) == 2 + 2 + 1
        assert all("simulated" in one.title for one in shown)
        assert settings.title == "Settings"


def test_figures_hold_a_sample_of_every_seed_and_the_settings(cascade: Report, day: Report) -> None:
    for report, keys in (
        (cascade, ("violations", "fid", "fid_over_time", "deferral", "num_plan_changes")),
        (day, ("attainment", "worst", "gpu_hours", "num_plan_changes", "num_starts")),
    ):
        figures = json.loads(json.dumps(report.figures, allow_nan=False))
        assert figures["seeds"] == [0, 1]
        first, *others = figures["policies"]
        assert first["chosen_by"] == "default"
        assert set(first["settings"]) >= {"utilisation"}
        for key in keys:
            samples = first[key]["samples"]
            assert sum(samples) / 2 == pytest.approx(first[key]["value"], abs=1e-5)
            for one, gained in zip(others, figures["first_minus_others"], strict=True):
                assert one["policy"] == gained["policy"]
                assert len(one[key]["samples"]) == gained[key]["num"] == 2
                difference = first[key]["value"] - one[key]["value"]
                assert gained[key]["value"] == pytest.approx(difference)


def test_tables_say_what_the_figures_say(cascade: Report) -> None:
    means, differences, settings = cascade.tables
    assert [row[0] for row in means.rows] == CASCADE["policies"]
    figures = {one["policy"]: one for one in cascade.figures["policies"]}
    for row in means.rows:
        cells = dict(zip(means.columns, row, strict=True))
        one = figures[cells["policy"]]
        assert cells["violations, %"].startswith(f"{100 * one['violations']['value']:.2f} ± ")
        assert cells["FID"].startswith(f"{one['fid']['value']:.2f} ± ")
        assert cells["changes"].startswith(f"{one['num_plan_changes']['value']:.1f} ± ")
    assert differences.title.startswith("allocation minus others")
    assert [row[0] for row in differences.rows] == ["diffserve", "all-light"]
    assert settings.rows[2] == ["all-light", "max_batch 4", "default"]


def test_a_point_of_each_policy_stands_for_both_of_its_figures(
    cascade: Report, day: Report
) -> None:
    for report, x, y in ((cascade, "violations", "fid"), (day, "gpu_hours", "attainment")):
        (lines,) = report.plots[0].panels.values()
        assert list(lines) == [one["policy"] for one in report.figures["policies"]]
        for one in report.figures["policies"]:
            line = lines[one["policy"]]
            across, up = (100 if key in ("violations", "attainment") else 1 for key in (x, y))
            assert line.x == [pytest.approx(across * one[x]["value"])]
            assert line.y == [pytest.approx(up * one[y]["value"])]
            assert line.x_half_widths == [pytest.approx(across * one[x]["half_width"])]
            assert line.half_widths == [pytest.approx(up * one[y]["half_width"])]


def test_two_policies_are_shown_over_time(cascade: Report, day: Report) -> None:
    panels = cascade.plots[1].panels
    assert list(panels) == ["requests per second", "deferred, %", "violations, %", "images waiting"]
    for name in list(panels)[1:]:
        assert list(panels[name]) == ["allocation", "diffserve"]
    (requests,) = panels["requests per second"].values()
    first = cascade.figures["policies"][0]["num_requests"]["samples"][0]
    assert sum(requests.y) * 5 == pytest.approx(first)
    panels = day.plots[1].panels
    assert list(panels["requests per second"]) == ["sd15", "sdxl"]
    assert list(panels["sdxl: ready"]) == ["allocation", "ongoing-requests"]
    assert max(panels["sd15: ready"]["ongoing-requests"].y) >= 3
    assert max(panels["loading"]["allocation"].y) >= 1


def test_one_policy_and_one_seed_make_a_report_without_differences(tmp_path: Path) -> None:
    report = report_of(tmp_path, {**CASCADE, "policies": ["static"], "num_seeds": 1})
    assert [one.title for one in report.tables] == ["Means (simulated)", "Settings"]
    assert "±" not in "".join(report.tables[0].rows[0])
    json.dumps(report.figures, allow_nan=False)


def test_a_timeline_counts_gpus_and_keeps_broken_ones_apart() -> None:
    fleet = Fleet(
        (DeviceSpec("A100"),),
        (PoolSpec("light", "light", "A100", ()), PoolSpec("heavy", "heavy", "A100", ())),
        (),
    )

    def state(at_s: float, light: PoolState, heavy: PoolState, num_working: int) -> ClusterState:
        return ClusterState(at_s, (DeviceState("A100", num_working),), (light, heavy), (), ())

    states = (
        state(0.0, PoolState("light", 1), PoolState("heavy", 1, num_loading=1), 4),
        state(2.0, PoolState("light", 2), PoolState("heavy", 1), 3),
        state(4.0, PoolState("light", 2), PoolState("heavy", 1), 3),
    )
    nothing = np.zeros(0)
    course = Course(5.0, {}, nothing, nothing, nothing, states)
    timeline = gpu_timeline(course, fleet, {"A100": 4}, title="simulated")
    assert timeline.rows == ["A100 1", "A100 2", "A100 3", "A100 4"]
    assert timeline.labels == ["light", "heavy", "heavy loads", "broken"]
    assert timeline.bars == [
        Bar(0, 0.0, 6.0, "light"),
        Bar(1, 0.0, 2.0, "heavy"),
        Bar(1, 2.0, 6.0, "light"),
        Bar(2, 0.0, 2.0, "heavy loads"),
        Bar(2, 2.0, 6.0, "heavy"),
        Bar(3, 2.0, 6.0, "broken"),
    ]


WRONG_CASCADES = [
    ({"speed": 3}, "speed: there is no such key; .*confidence_power"),
    ({"policies": ["aimd", "aimd"]}, "policies: .*given twice: aimd"),
    ({"policies": ["ours"]}, "there is no policy 'ours'; there are allocation, .*queue-1"),
    ({"num_gpus": 1}, r"num_gpus: .*at least 2 \(given 1\)"),
    ({"low_per_s": 40}, "low_per_s must be at most high_per_s, 32; given 40"),
    ({"high_per_s": 1e6}, "some 5,000,000 requests a run; allowed: 50 to 2,000,000"),
    ({"cvs": [1, -1]}, r"cvs.1: .*at least 0 \(given -1\)"),
    ({"duration_s": 20000, "period_s": 0.1}, "more than 100,000 rounds"),
    ({"load_s": float("nan")}, "load_s"),
    ({"batching_gain": 0}, "batching_gain: .*greater than 0"),
    ({"slo_s": 1.5}, "slo_s: given 1.5; allowed: at least 1.89"),
    ({"light_profile": "h100"}, "there is no profile 'h100'"),
    ({"light_profile": "sd15-a100"}, "light_profile: given 'sd15-a100'; allowed: .*discriminate"),
    ({"heavy_profile": "sdxl-h100"}, "heavy_profile: given 'sdxl-h100', which has no whole"),
    ({"policies": ["static"], "high_per_s": 900}, "policies: given 'static': 16 GPUs can't carry"),
    ({"choices": "experiment.yaml"}, "the choices .*: Invalid JSON.*benchmarks/policies"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_CASCADES)
def test_what_is_wrong_with_a_cascade_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, {**CASCADE, **changes}))


WRONG_WORKLOADS = [
    ({"gpus": 3}, "workloads.0.gpus: there is no such key; did you mean 'num_gpus'"),
    ({"num_initial": 9}, "workloads.0: .*num_initial must be at most num_gpus, 8; given 9"),
    ({"service": "sdxl"}, "services must differ from each other; given sdxl, sdxl"),
    ({"max_batch": 64}, "the workload sd15: max_batch must be at most 32, .*given 64"),
    ({"steps": 50}, "the workload sd15: given 'sd15-a100', which has no steps of 1024 px"),
    ({"profile": "sdxl-h100"}, "the workload sd15: given 'sdxl-h100', which has no whole"),
    ({"slo_s": 1}, "the workload sd15: slo_s: given 1; allowed: at least 1.78"),
    ({"low_per_s": 9}, "the workload sd15: low_per_s must be at most high_per_s, 4; given 9"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_WORKLOADS)
def test_what_is_wrong_with_a_workload_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    first, second = DAY["workloads"]
    content = {**DAY, "workloads": [{**first, **changes}, second]}
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, content))


def test_a_policy_of_another_kind_is_none_of_a_day(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are allocation, ongoing-requests, clairvoyant"):
        load_experiment(written(tmp_path, {**DAY, "policies": ["diffserve"]}))


def test_chosen_settings_are_used_and_must_be_those_of_the_policy(tmp_path: Path) -> None:
    def choose(**settings: float) -> None:
        one = {"kind": "cascade", "policy": "diffserve", "settings": settings}
        (tmp_path / "choices.json").write_text(json.dumps([{**one, "chosen_by": "search"}]))

    content = {**CASCADE, "policies": ["diffserve"], "choices": "choices.json"}
    choose(smoothing=0.2, demand_factor=1.15)
    report = report_of(tmp_path, {**content, "num_seeds": 1})
    assert report.figures["policies"][0]["settings"] == {"smoothing": 0.2, "demand_factor": 1.15}
    assert report.figures["policies"][0]["chosen_by"] == "search"
    with pytest.raises(ConfigError, match=r"given 'proteus', for which .* no settings"):
        load_experiment(written(tmp_path, {**content, "policies": ["diffserve", "proteus"]}))
    choose(smoothing=0.2, factor=7.0)
    with pytest.raises(ConfigError, match=r"choices: given .*7.0.* for 'diffserve'; allowed"):
        load_experiment(written(tmp_path, content))


def test_the_headline_files_compare_every_policy() -> None:
    for kind, experiment in KINDS.items():
        content = yaml.safe_load((FOLDER / f"{kind}.yaml").read_text())
        assert set(content["policies"]) == {one.name for one in experiment.POLICIES}
        assert content["policies"][0] == "allocation"


def test_days_of_variants_are_the_headlines() -> None:
    head = yaml.safe_load((FOLDER / "autoscaling.yaml").read_text())
    for path in FOLDER.glob("autoscaling-*.yaml"):
        assert yaml.safe_load(path.read_text())["workloads"] == head["workloads"], path


def test_an_experiment_is_a_value_that_knows_its_seeds() -> None:
    experiment = CascadeExperiment.model_validate({**CASCADE, "first_seed": 7})
    assert list(experiment.seeds) == [7, 8]
    assert experiment == CascadeExperiment.model_validate({**CASCADE, "first_seed": 7})
