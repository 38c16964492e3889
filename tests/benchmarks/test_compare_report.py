from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.compare.__main__ import main
from benchmarks.serving.compare.calibration import Calibration
from benchmarks.serving.compare.cells import CellStore, ComparedCell
from benchmarks.serving.compare.contenders import CONTENDERS, OwnContender, Site
from benchmarks.serving.compare.images import Likeness
from benchmarks.serving.compare.outcomes import FATES
from benchmarks.serving.compare.pace import LivePace
from benchmarks.serving.compare.plot import save_plot
from benchmarks.serving.compare.prediction import Prediction
from benchmarks.serving.compare.report import write_markdown
from benchmarks.serving.compare.summary import Summary, aims_of
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
        "books": {"nothing_lost": nothing_lost},
        "client": {"cpu_share": 0.02, "late_send_max_s": 0.004},
        "cores_of_others": 0.25,
        "commit": "abc",
    }


def summed_up(
    folder: Path, shares: Mapping[str, tuple[float, ...]] | None = None
) -> tuple[Summary, dict[str, Any]]:
    store = CellStore(folder, COMPARED)
    drawn = traces(COMPARED)
    for trace in drawn[:-1]:
        for name, found in {**SHARES, **(shares or {})}.items():
            for load, share in zip(COMPARED.loads, found, strict=True):
                store.add(ComparedCell(name, load, trace.name), figures(share))
    # the last one is not finished
    store.add(ComparedCell("ours", 0.5, drawn[-1].name), figures(0.0))
    simulated = [Prediction(load, one.name, 0.97, 0.03) for one in drawn for load in COMPARED.loads]
    slower = [replace(one, attainment=0.83) for one in simulated if one.load > 0.5]
    pace = LivePace(0.5, 1.2, tuple(slower))
    summary = Summary(COMPARED, drawn, store, {"ours": simulated}, {"ours": pace})
    calibration = Calibration(ALONE_S, ALONE_S, {"one-by-one": 3.0, "static": 4.0}, {})
    result = {
        "quick": False,
        "started": "2026-01-01T00:00:00",
        "commit": "abc",
        "images": [],
        "machine": {"cpu": "some", "cores": 4, "usable_cores": 2},
        "settings": COMPARED.as_dict(),
        "calibration": asdict(calibration) | {"rate_per_s": calibration.rate_per_s},
        "num_traces": len(summary.traces),
        "paces": {"ours": {"load": 0.5, "factor": 1.2}},
        **summary.as_dict(),
    }
    return summary, result


def test_only_traces_that_everyone_has_had_count(tmp_path: Path) -> None:
    summary, result = summed_up(tmp_path)
    assert len(summary.traces) == 5
    assert {name: len(found) for name, found in summary.groups().items()} == {
        "all": 5,
        "poisson": 3,
        "bursty": 2,
    }
    assert all(run["requests"] == 5 * 40 for run in result["runs"])


def test_headline_is_over_the_baseline_that_does_best_at_it(tmp_path: Path) -> None:
    _, result = summed_up(tmp_path)
    headline = result["groups"]["all"]["headline"]
    assert headline["goodput_of"] == headline["strained"] == "static"
    # 1.25 over 0.75; ours has 0.9 where static has 0.6, at 1.25
    assert headline["goodput_ratio"]["value"] == pytest.approx(5 / 3)
    assert headline["strained_load"]["load"] == pytest.approx(1.25)
    assert headline["ours_there"]["value"] == pytest.approx(0.9)
    aims = {aim.name: aim for aim in aims_of({"groups": {"all": result["groups"]["all"]}})}
    assert aims["all: goodput at 90 % in time, over static"].verdict == "no"
    assert aims["all: ours in time where static has 60 %"].verdict == "yes"


def test_prediction_is_judged_by_its_distance_from_what_was_seen(tmp_path: Path) -> None:
    _, result = summed_up(tmp_path)
    verdicts = {aim.name: aim.verdict for aim in aims_of(result) if "simulated" in aim.name}
    # 0.97 beside 1.0, and beside 0.8
    assert verdicts["all: simulated beside live, ours, load 0.5"] == "yes"
    assert verdicts["all: simulated beside live, ours, load 1.5"] == "no"
    # 0.83 beside 0.8; the load at which the pace was seen is no prediction
    assert verdicts["all: simulated at the pace seen beside live, ours, load 1.5"] == "yes"
    assert "all: simulated at the pace seen beside live, ours, load 0.5" not in verdicts


def test_report_has_every_contender_and_says_what_is_simulated(tmp_path: Path) -> None:
    _, result = summed_up(tmp_path)
    text = write_markdown(result)
    assert "predicted (simulated), %" in text
    assert "takes 1.20 times as long as in the profile" in text
    ours = "| 1.5 | 6.00 | ours | 80.0 (80.0 to 80.0) | 40.0 (40.0 to 40.0) over static |"
    assert f"{ours} 97.0 | 83.0 |" in text
    for name in COMPARED.contenders:
        assert f"| {name} |" in text
    assert "NO" not in text
    assert "Images beside" not in text
    likeness = Likeness("ours", "poisson-0", "one-by-one/guarded", 17, 12, 0.98765, "bfloat16")
    result["images"] = [asdict(likeness)]
    pictured = write_markdown(result)
    assert "## Images beside those of one-by-one/guarded," in pictured
    assert "| ours | poisson-0 | 17 | 12/255 | 0.9877 |" in pictured
    result["runs"][0]["nothing_lost"] = False
    assert "NO" in write_markdown(result)
    assert save_plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


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
    ("shares", "said"),
    [
        ({"ours": (0.8, 0.7, 0.6)}, "ours has less than 90 % in time at every load"),
        ({"static": (0.8, 0.5, 0.4)}, "or more: the level was not reached"),
        ({"ours": (1.0, 1.0, 1.0)}, "or more: the level was not reached"),
        ({"static": (1.0, 1.0, 1.0)}, "says nothing"),
        ({"static": (1.0, 1.0, 0.7)}, "static has more than 60 % in time at every load"),
    ],
)
def test_what_was_not_reached_is_said_and_never_judged(
    tmp_path: Path, shares: dict[str, tuple[float, ...]], said: str
) -> None:
    _, result = summed_up(tmp_path, shares)
    assert said in write_markdown(result)
    aims = aims_of({"groups": {"all": result["groups"]["all"]}})
    judged = [aim.name for aim in aims if "simulated" not in aim.name]
    if "static has more" in said:
        assert not any("has 60 %" in name for name in judged)
    if "less than 90" in said or "says nothing" in said:
        assert not any("goodput" in name for name in judged)
    if "or more" in said:
        # what may be more is not too little
        [verdict] = [aim.verdict for aim in aims if "goodput" in aim.name]
        assert verdict in {"yes", "unsure"}


def test_folder_without_runs_and_unknown_contenders_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--report-only", "--out", str(tmp_path)]) == 2
    assert "no runs" in capsys.readouterr().err
    # the folder has been begun with other settings
    assert main(["--requests", "7", "--out", str(tmp_path)]) == 2
    assert "num_requests 150, now 7" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--contenders", "ours,theirs"])
    assert "allowed: one-by-one" in capsys.readouterr().err
