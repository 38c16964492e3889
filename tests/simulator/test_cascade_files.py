"""Cascades from files: curves, profiles and traces beside an experiment's own file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ray_cluster.errors import ConfigError
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.control.experiment import run_policy
from ray_cluster.simulator.experiments import load_experiment
from ray_cluster.simulator.results import mean_of
from ray_cluster.simulator.sizing import CascadeSizingTask, Tried
from tests.models.test_cascade_curves import CURVES
from tests.simulator.control_files import CASCADE
from tests.simulator.test_control_file import report_of

PROFILES = Path(__file__).parents[2] / "ray_cluster" / "models" / "profile_data"
FILES: dict[str, Any] = {"light_profile": "light.yaml", "curves": "curves.json"}
TRACED: dict[str, Any] = {
    key: value for key, value in (CASCADE | FILES).items() if key != "duration_s"
} | {"trace": "trace.csv", "num_seeds": 1}
# two bursts in 24 seconds, and columns that a cascade does not need
INSTANTS_S = [*(0.25 * n for n in range(48)), *(20 + 0.05 * n for n in range(80))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "curves.json").write_text(json.dumps(CURVES))
    shutil.copy(PROFILES / "sdxs-a100.yaml", tmp_path / "light.yaml")
    rows = "".join(f"{at_s},sdxl\n" for at_s in reversed(INSTANTS_S))
    (tmp_path / "trace.csv").write_text(f"arrival_s,model\n{rows}")
    return tmp_path


def located(content: dict[str, Any], folder: Path) -> CascadeExperiment:
    return CascadeExperiment.model_validate(content).located(folder)


def test_the_first_cascade_is_what_it_was_before_its_curves_were_a_file() -> None:
    short = CascadeExperiment.model_validate({**CASCADE, "duration_s": 12})
    for name, expected in (
        ("diffserve", (0.02991452991452992, 0.6623888552935117, 16.908538825057672)),
        ("proteus", (0.15384615384615385, 0.7319561971129915, 19.681144848183177)),
        ("static", (0.0, 0.38828849276323835, 17.340809399933658)),
    ):
        figures = run_policy(short, name, short.policy(name).defaults, 5).figures
        found = [figures[key] for key in ("violations", "deferral", "fid")]
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_report_names_the_quality_and_says_which_scores_are_better(folder: Path) -> None:
    report = report_of(
        folder, CASCADE | FILES | {"num_seeds": 1, "policies": ["static", "all-heavy"]}
    )
    assert "CLIP score (higher is better) is that of the curves curves.json" in report.what
    assert report.tables[0].columns[2:4] == ["CLIP score", "CLIP score over time"]
    assert list(report.plots[0].panels) == ["CLIP score, higher is better"]
    ours, heavy = report.figures["policies"]
    assert heavy["clip_score"]["value"] == 0.3
    assert 0.25 < ours["clip_score"]["value"] <= 0.31
    # scores that differ by 0.06 are told apart
    assert report.tables[0].rows[1][2] == "0.3000"
    assert report.figures["experiment"]["curves"] == "curves.json"


def test_a_higher_score_is_better_where_policies_are_sized(folder: Path) -> None:
    content = {"kind": "cascade", "name": "small", **FILES, "worst_quality": 0.3}
    task = CascadeSizingTask.model_validate(content).located(folder)
    poor, good = (Tried(mean_of([0.0]), mean_of([one]), {}) for one in (0.29, 0.31))
    assert (poor.is_good(task), good.is_good(task)) == (False, True)


def test_a_trace_is_replayed_and_only_confidences_depend_on_the_seed(folder: Path) -> None:
    experiment = located(TRACED, folder)
    first, second = (experiment.requests(seed) for seed in (0, 1))
    assert [one.arrival_s for one in first] == sorted(INSTANTS_S)
    assert [one.arrival_s for one in second] == sorted(INSTANTS_S)
    assert [one.confidence for one in first] != [one.confidence for one in second]
    # the last is at 23.95; the busiest five seconds have the second burst
    assert experiment.span_s == pytest.approx(23.95 + 10)
    assert experiment.peak_per_s == pytest.approx(80 / 5)
    assert experiment.mean_per_s == pytest.approx(128 / 23.95)
    report = report_of(folder, TRACED)
    for one in report.figures["policies"]:
        assert one["num_requests"]["value"] == 128
    (requests,) = report.plots[1].panels["requests per second"].values()
    assert np.sum(requests.y) * 5 == pytest.approx(128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"high_per_s": 8}, "high_per_s: given 8.0; a trace says that itself"),
        ({"trace": "none.csv"}, "cannot read the trace .*none.csv"),
        ({"trace": "trace.txt"}, "a trace's name ends in .csv or .jsonl; given 'trace.txt'"),
        ({"trace": "bad.csv"}, "bad.csv, line 3: arrival_s: must be at least 0"),
        ({"bin_s": 0.1, "trace": "long.csv"}, "bin_s: given 0.1; allowed: at least .*, 20"),
        ({"period_s": 0.1, "bin_s": 60, "trace": "long.csv"}, "more than 100,000 rounds"),
        ({"curves": "none.json"}, "cannot read the curves .*none.json"),
        ({"curves": "taken.json"}, "curves: given 'Deferral' as the quality's name; allowed"),
        ({"heavy_profile": "other.yaml"}, "heavy_profile: given one of L40S; allowed: of A100"),
        ({"light_profile": "none.yaml"}, "cannot read the profile .*none.yaml"),
    ],
)
def test_what_is_wrong_with_files_of_a_cascade_is_said(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    (folder / "bad.csv").write_text("arrival_s\n1\n-1\n")
    (folder / "long.csv").write_text("arrival_s\n1\n2000000\n")
    quality = CURVES["quality"] | {"name": "Deferral"}
    (folder / "taken.json").write_text(json.dumps(CURVES | {"quality": quality}))
    heavy = yaml.safe_load((PROFILES / "sd15-a100.yaml").read_text())
    (folder / "other.yaml").write_text(yaml.safe_dump(heavy | {"device": "L40S"}))
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(TRACED | changes))
    with pytest.raises(ConfigError, match=message) as raised:
        load_experiment(path)
    assert "\n" not in str(raised.value)
