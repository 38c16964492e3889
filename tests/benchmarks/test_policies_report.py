"""The report over all experiments: every aim beside its figure, and nothing made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.policies import run
from benchmarks.policies.aims import headlines
from benchmarks.policies.report import write_report
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.results import mean_of

TINY = {
    "kind": "cell",
    "name": "tiny",
    "what": "A few images.",
    "profile": "sdxl-h100",
    "sizes": [{"width": 512, "height": 512}],
    "steps": 5,
    "duration_s": 5,
    "rates_per_s": [2],
    "policies": ["deadline", "fcfs"],
}


def test_experiments_of_the_folder_are_called_like_their_files() -> None:
    for path in run.FOLDER.glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["name"] == path.stem


@pytest.mark.slow
def test_one_command_runs_what_is_asked_for_and_writes_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    for name in ("tiny", "tiny-too", "left-out"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**TINY, "name": name}))
    out = tmp_path / "out"
    options = ["--only", "tiny*", "--seeds", "2", "--processes", "1", "--out", str(out)]
    assert run.main(options) == 0
    text = (out / "report.md").read_text()
    assert text.count("## tiny\n") == text.count("## tiny-too\n") == 1
    assert text.count("![tiny-attainment]") == text.count("![tiny-too-attainment]") == 1
    assert "left-out" not in text
    assert json.loads((out / "tiny.json").read_text())["experiment"]["num_seeds"] == 2
    made = (out / "tiny.json").stat().st_mtime_ns
    assert run.main([*options, "--go-on"]) == 0
    assert (out / "tiny.json").stat().st_mtime_ns == made
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "rates_per_s": [3]}))
    assert run.main([*options, "--go-on"]) == 0
    assert json.loads((out / "tiny.json").read_text())["experiment"]["rates_per_s"] == [3.0]
    capsys.readouterr()
    assert run.main(["--only", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_an_experiment_that_cannot_run_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "steps": 0}))
    assert run.main(["--out", str(tmp_path / "out")]) == 1
    assert "steps" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_figures_that_cannot_be_read_are_told_before_anything_runs(
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    for name in ("damaged", "tiny"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**TINY, "name": name}))
    (tmp_path / "damaged.json").write_bytes(content)
    assert run.main(["--only", "tiny", "--out", str(tmp_path)]) == 1
    assert "damaged.json" in capsys.readouterr().err
    assert not (tmp_path / "tiny.json").exists()


def test_figures_of_other_cells_than_the_report_asks_for_are_an_error(tmp_path: Path) -> None:
    results = {"mixed-sizes": {"experiment": {"rates_per_s": [1.0]}, "cells": []}}
    with pytest.raises(ConfigError, match="run these again"):
        write_report(tmp_path, results, head="")


def test_figures_without_their_tables_are_reported_as_such(tmp_path: Path) -> None:
    report = write_report(tmp_path, {"tiny": {"experiment": {}}}, head="")
    assert "tiny.txt, are not beside" in report.read_text()
    report.unlink()
    report.mkdir()
    with pytest.raises(ConfigError, match="can't be written"):
        write_report(tmp_path, {}, head="")


def groups(gain: float, *, seeds: int = 4) -> dict[str, Any]:
    """An experiment in which ours gains so much over each other policy, in every cell."""
    cells = []
    for scale in (1.0, 1.3):
        base = [0.7 + 0.01 * seed for seed in range(seeds)]
        shares = {"rounds/most": [one + gain for one in base], "bound": [one + 0.1 for one in base]}
        for policy in ("rounds/most", "rounds/large", "widest", "best_static", "bound"):
            samples = shares.get(policy, base)
            large = mean_of(samples).as_figures()
            cells.append(
                {
                    "mix": "uniform",
                    "rate_per_min": 12.0,
                    "scale": scale,
                    "policy": policy,
                    "samples": samples,
                    "by_class": {"2048": large},
                }
            )
    experiment = {"mixes": ["uniform"], "rates_per_min": [12.0], "scales": [1.0, 1.3]}
    return {"experiment": experiment, "cells": cells}


def test_aims_are_met_by_paired_gains_and_the_worst_of_other_conditions_stands_beside() -> None:
    table, noisy, switching = groups(0.08), groups(0.04), groups(0.06)
    results = {"sp-table-a-12": table, "sp-switch-0": switching, "sp-noise": noisy}
    by_name = {one.aim.name: one for one in headlines(results) if one.aim.name != "the same"}
    static = by_name["uniform, 12/min: over the best static, mean over scales"]
    assert static.aim.measured == pytest.approx(8)
    assert static.aim.verdict == "yes"
    assert [name for name, _ in static.others] == ["sp-noise", "sp-switch-0"]
    (bound,) = (one for name, one in by_name.items() if "no schedule" in name)
    assert (bound.aim.measured, bound.aim.verdict) == (pytest.approx(2), "no")
    (cost,) = (one for name, one in by_name.items() if "that it costs" in name)
    assert (cost.aim.measured, cost.aim.verdict) == (pytest.approx(8), "no")


def cells(rates: dict[float, tuple[float, float, float]]) -> dict[str, Any]:
    """Attainments of ours, FCFS and Algorithm 1 by rate."""
    names = ("deadline", "fcfs", "slack")
    return {
        "experiment": {"rates_per_s": list(rates)},
        "cells": [
            {"policy": name, "rate_per_s": rate, "samples": [share, share]}
            for rate, shares in rates.items()
            for name, share in zip(names, shares, strict=True)
        ],
        "false_refusals": [
            {"load": rate, "of_arrivals": mean_of([0.01 * rate, 0.01 * rate]).as_figures()}
            for rate in rates
        ],
    }


def test_mixed_sizes_are_compared_where_the_first_come_are_half_content() -> None:
    found = headlines({"mixed-sizes": cells({1.0: (1, 0.9, 0.99), 2.0: (0.95, 0.58, 0.97)})})
    over_fcfs, over_algorithm_1, refusals = found
    # 0.6 lies 30/32 of the way from the one rate to the other
    assert "60%, between 1 and 2/s" in over_fcfs.aim.name
    assert over_fcfs.aim.measured == pytest.approx(10 + 27 * 30 / 32)
    assert (over_algorithm_1.aim.measured, over_algorithm_1.aim.verdict) == (
        pytest.approx(-2),
        "no",
    )
    assert (refusals.aim.measured, refusals.aim.verdict) == (pytest.approx(2), "yes")


def planned(name: str, **figures: float) -> dict[str, Any]:
    """A planned cluster's figures, the same for ours and as differences to Ray Serve's."""
    means = {key: mean_of([value, value]).as_figures() for key, value in figures.items()}
    return {
        "policies": [{"policy": "allocation", **means}],
        "first_minus_others": [{"policy": "ongoing-requests", **means}],
        "experiment": {"name": name},
    }


def test_planned_clusters_stand_beside_what_is_asked_of_them() -> None:
    results = {
        "cascade": planned("cascade", violations=0.001, fid=16.9),
        "cascade-noise": planned("cascade-noise", violations=0.06, fid=17.1),
        "cascade-loads": planned("cascade-loads", violations=0.002, fid=17.2),
        # of other models: no variant
        "cascade-2": planned("cascade-2", violations=0.5, fid=99.0),
        "autoscaling": planned("autoscaling", attainment=0.99, gpu_hours=-3, num_plan_changes=2),
    }
    results["cascade-2"]["experiment"]["light_profile"] = "sdxs-a100"
    violations, fid, on_time, hours, changes = headlines(results)
    assert [name for name, _ in violations.others] == ["cascade-noise", "cascade-loads"]
    assert [name for name, _ in fid.others] == ["cascade-loads", "cascade-noise"]
    found = (violations.aim, fid.aim, on_time.aim, hours.aim, changes.aim)
    assert [one.verdict for one in found] == ["yes", "yes", "no", "yes", "no"]
    assert [one.measured for one in found] == pytest.approx([0.1, 16.9, 99, -3, 2])
