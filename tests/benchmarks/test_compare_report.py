from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.compare.__main__ import main, write_report
from benchmarks.serving.compare.calibration import Calibration
from benchmarks.serving.compare.outcomes import FATES
from benchmarks.serving.compare.prediction import Prediction
from benchmarks.serving.compare.results import ComparedCell, ResultStore
from benchmarks.serving.compare.summary import Summary
from benchmarks.serving.contenders import CONTENDERS, OwnContender, Site
from ray_cluster.config.loading import load_config
from tests.benchmarks.comparing import ALONE_S, SETTINGS, traces

COMPARED = replace(
    SETTINGS, contenders=("one-by-one", "static", "ours"), loads=(0.5, 1.0, 1.5), num_traces=3
)
# in time at the three loads
SHARES = {"one-by-one": (0.7, 0.5, 0.2), "static": (1.0, 0.8, 0.4), "ours": (1.0, 1.0, 0.8)}


def figures(share: float, *, nothing_lost: bool = True) -> dict[str, Any]:
    met = round(40 * share)
    requests = [[0, 0.5]] * met + [[FATES.index("refused"), 0.01]] * (40 - met)
    return {
        "attainment": share,
        "fates": {**dict.fromkeys(FATES, 0), "in time": met, "refused": 40 - met},
        "requests": requests,
        "accounts": {"nothing_lost": nothing_lost},
        "client_cpu_share": 0.02,
        "client_late_send_max_s": 0.004,
        "cores_of_others": 0.25,
    }


def summed_up(
    folder: Path, shares: Mapping[str, tuple[float, ...]] | None = None, **more: Any
) -> Summary:
    store = ResultStore(folder, COMPARED)
    drawn = traces(COMPARED)
    for trace in drawn[:-1]:
        for name, found in {**SHARES, **(shares or {})}.items():
            for load, share in zip(COMPARED.loads, found, strict=True):
                store.add(ComparedCell(name, load, trace.name), figures(share, **more))
    # the last one is not finished
    store.add(ComparedCell("ours", 0.5, drawn[-1].name), figures(0.0))
    simulated = [Prediction(load, one.name, 0.97) for one in drawn for load in COMPARED.loads]
    return Summary(COMPARED, drawn, store, rate_per_s=4.0, predictions={"ours": simulated})


def verdicts(sections: Mapping[str, Any]) -> dict[str, str]:
    return {aim["name"]: aim["verdict"] for aim in sections["all traces"]["aims"]}


def test_only_traces_that_everyone_has_had_count(tmp_path: Path) -> None:
    summary = summed_up(tmp_path)
    sections = summary.sections()
    assert len(summary.traces) == 5
    assert {name: one["what"][:8] for name, one in sections.items() if name != "runs"} == {
        "all traces": "5 traces",
        "poisson traces": "3 traces",
        "bursty traces": "2 traces",
    }
    rows = sections["runs"]["tables"]["requests"]
    assert all(sum(row[fate] for fate in FATES) == 5 * 40 for row in rows)


def test_headline_is_over_the_baseline_that_does_best_at_it(tmp_path: Path) -> None:
    sections = summed_up(tmp_path).sections()
    # 1.25 over 0.75; ours has 0.9 where static has 0.6, at 1.25
    assert sections["all traces"]["notes"] == [
        "goodput: 1.67 (1.67 to 1.67) times that of static",
        "static has 60 % in time at load 1.25; ours has 90.0 % there",
    ]
    found = verdicts(sections)
    assert found["all traces: goodput at 90 % in time, over static"] == "no"
    assert found["all traces: ours in time where static has 60 %"] == "yes"
    # 0.97 beside 1.0, and beside 0.8
    assert found["all traces: simulated beside live, ours, load 0.5"] == "yes"
    assert found["all traces: simulated beside live, ours, load 1.5"] == "no"


def test_report_has_every_contender_and_says_what_is_simulated(tmp_path: Path) -> None:
    result = {
        "quick": False,
        "started": "2026-01-01T00:00:00",
        "commit": "abc",
        "machine": {"cpu": "some", "cores": 4, "usable_cores": 2},
        "settings": asdict(COMPARED),
        "calibration": asdict(Calibration(ALONE_S, {"one-by-one": 3.0, "static": 4.0}, {})),
        "sections": summed_up(tmp_path).sections(),
    }
    assert write_report(tmp_path, result) == 0
    text = (tmp_path / "report.md").read_text()
    assert "predicted percent simulated" in text
    assert "| 1.5 | 6 | ours | 80 (80 to 80) | 40 (40 to 40) | static | 97 |" in text
    for name in COMPARED.contenders:
        assert f"| {name} |" in text
    assert "FAILED" not in text
    assert (tmp_path / "attainment.png").stat().st_size > 1000


def test_lost_requests_are_a_problem(tmp_path: Path) -> None:
    runs = summed_up(tmp_path, nothing_lost=False).sections()["runs"]
    assert "static lost requests at load 1.0" in runs["problems"]


@pytest.mark.parametrize("name", [n for n, c in CONTENDERS.items() if isinstance(c, OwnContender)])
def test_configuration_of_the_service_is_one_that_it_takes(tmp_path: Path, name: str) -> None:
    contender = CONTENDERS[name]
    assert isinstance(contender, OwnContender)
    site = Site(tmp_path, tmp_path / "ray", "bfloat16", {})
    config = load_config(contender.config(site, 18999))
    [pool] = config.pools
    assert (pool.replicas, pool.num_threads, pool.dtype) == (1, 1, "bfloat16")
    assert config.ray.auth == "disabled"
    assert str(tmp_path) in config.storage.jobs


@pytest.mark.parametrize(
    ("shares", "note"),
    [
        ({"ours": (0.8, 0.7, 0.6)}, "ours has less than 90 % in time at every load"),
        ({"static": (0.8, 0.5, 0.4)}, "or more: the level was not reached"),
        ({"ours": (1.0, 1.0, 1.0)}, "or more: the level was not reached"),
        ({"static": (1.0, 1.0, 1.0)}, "static has 90 % in time at every load"),
        ({"static": (1.0, 1.0, 0.7)}, "static has more than 60 % in time at every load"),
    ],
)
def test_what_was_not_reached_is_said_and_never_judged(
    tmp_path: Path, shares: dict[str, tuple[float, ...]], note: str
) -> None:
    sections = summed_up(tmp_path, shares).sections()
    assert any(note in one for one in sections["all traces"]["notes"])
    judged = {name: one for name, one in verdicts(sections).items() if "simulated" not in name}
    if "static has more" in note:
        assert not any("has 60 %" in name for name in judged)
    if "less than 90" in note or "static has 90" in note:
        assert not any("goodput" in name for name in judged)
    if "or more" in note:
        # what may be more is not too little
        [verdict] = [one for name, one in judged.items() if "goodput" in name]
        assert verdict in {"yes", "unsure"}


def test_folder_without_runs_and_unknown_contenders_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--report-only", "--out", str(tmp_path)]) == 2
    assert "no runs" in capsys.readouterr().err
    # the folder has been begun with other settings
    assert main(["--dtype", "bfloat16", "--out", str(tmp_path)]) == 2
    assert "dtype 'float32', now 'bfloat16'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--contenders", "ours,theirs"])
    assert "allowed: one-by-one" in capsys.readouterr().err
