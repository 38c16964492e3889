"""``ray-cluster simulate`` runs experiments in processes of its own and writes what they show."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from PIL import Image

from tests.cli.conftest import Cli
from tests.simulator.control_files import CASCADE, DAY

EXPERIMENT = """\
kind: cell
name: tiny
what: One replica.
profile: sdxl-h100
sizes: [{width: 512, height: 512}]
replicas: 1
steps: 10
rates_per_s: [1, 4]
duration_s: 5
policies: [deadline, fcfs]
num_seeds: 2
"""
GROUPS = """\
kind: sequence-parallel
name: groups
what: Eight GPUs.
profile: flux-h100-a
mixes: [uniform]
rates_per_min: [12]
scales: [1.5]
policies: [rounds/most, widest]
num_arrivals: 12
num_gpus: 8
num_seeds: 2
"""


def colours_of(path: Path) -> Counter[tuple[int, ...]]:
    """Pixels of each colour."""
    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(1 << 20)
    return Counter({colour: count for count, colour in colours})


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(EXPERIMENT)
    return path


def test_it_shows_tables_and_writes_figures_and_plots(
    cli: Cli, experiment: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = cli("simulate", experiment, "--out", out, "--processes", 1)
    assert result.exit_code == 0, result.output
    assert "simulated" in result.stdout
    figures = json.loads((out / "tiny.json").read_text())
    assert [len(cell["samples"]) for cell in figures["cells"]] == [2] * 4
    assert "Done in time" in (out / "tiny.txt").read_text()
    for name in ("attainment", "classes", "waiting"):
        with Image.open(out / f"tiny-{name}.png") as plot:
            assert plot.width > 400
    with Image.open(out / "tiny-timeline.png") as timeline:
        counts = {colour: count for count, colour in timeline.convert("RGB").getcolors(1 << 20)}
    # the only size there is, in bars and not in the legend alone
    assert counts[0x00, 0x72, 0xB2] > 2000


def test_figures_that_are_there_are_whole(cli: Cli, experiment: Path, tmp_path: Path) -> None:
    """Of a run that could not be written there are none, whatever an earlier one left."""
    out = tmp_path / "out"
    assert cli("simulate", experiment, "--out", out, "--processes", 1).exit_code == 0
    (out / "tiny-waiting.png").unlink()
    (out / "tiny-waiting.png").mkdir()
    result = cli("simulate", experiment, "--out", out, "--processes", 1)
    assert result.exit_code == 1
    assert "tiny has run, but can't be written" in result.stderr
    assert not (out / "tiny.json").exists()


def test_the_requests_of_an_experiment_are_written_as_a_trace_and_replayed(
    cli: Cli, experiment: Path, tmp_path: Path
) -> None:
    trace, out = tmp_path / "tiny.csv", tmp_path / "out"
    result = cli("simulate", experiment, "--out", out, "--write-trace", trace)
    assert result.exit_code == 0, result.output
    rows = trace.read_text().splitlines()
    assert rows[0] == "arrival_s,model,width,height,steps,slo_s,slo_class"
    assert f"wrote {len(rows) - 1} requests" in result.stderr
    assert not out.exists()
    drawn = ("sizes", "steps", "rates_per_s", "duration_s")
    content = {**yaml.safe_load(EXPERIMENT), "trace": "tiny.csv", "speeds": [1, 2]}
    experiment.write_text(
        yaml.safe_dump({key: value for key, value in content.items() if key not in drawn})
    )
    assert cli("simulate", experiment, "--out", out, "--processes", 1).exit_code == 0
    assert f"{len(rows) - 1} requests in" in (out / "tiny.txt").read_text()


@pytest.mark.parametrize(
    ("files", "trace", "message"),
    [
        (1, "tiny.txt", "ends in .csv or .jsonl; given 'tiny.txt'"),
        (1, "none/tiny.csv", "--write-trace"),
        (2, "tiny.csv", "one experiment; given 2"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused(
    cli: Cli, experiment: Path, tmp_path: Path, files: int, trace: str, message: str
) -> None:
    result = cli("simulate", *[experiment] * files, "--write-trace", tmp_path / trace)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_sequence_parallel_groups_have_a_timeline_too(cli: Cli, tmp_path: Path) -> None:
    path, out = tmp_path / "groups.yaml", tmp_path / "out"
    path.write_text(GROUPS)
    result = cli("simulate", path, "--out", out, "--processes", 1)
    assert result.exit_code == 0, result.output
    assert "uniform, 12 per minute" in (out / "groups.txt").read_text()
    figures = json.loads((out / "groups.json").read_text())
    assert [len(cell["samples"]) for cell in figures["cells"]] == [2] * 2
    counts = colours_of(out / "groups-timeline.png")
    # the smallest and the largest class: in the legend, and the latter in bars of many seconds
    assert counts[0x00, 0x72, 0xB2] > 50
    assert counts[0xCC, 0x79, 0xA7] > 5000
    assert len(list(out.glob("groups-*.png"))) == 3


@pytest.mark.parametrize(
    ("content", "trade_off"),
    [(CASCADE, "quality"), pytest.param(DAY, "cost", marks=pytest.mark.slow)],
)
def test_control_loops_are_plotted_over_time_too(
    cli: Cli, tmp_path: Path, content: dict[str, Any], trade_off: str
) -> None:
    path, out, name = tmp_path / "file.yaml", tmp_path / "out", content["name"]
    path.write_text(yaml.safe_dump({**content, "num_seeds": 2}))
    result = cli("simulate", path, "--out", out, "--processes", 1)
    assert result.exit_code == 0, result.output
    # names are whole in a narrow terminal
    for policy in content["policies"]:
        assert f" {policy} " in result.stdout
    assert (
        "allocation minus others, paired by seed (simulated)" in (out / f"{name}.txt").read_text()
    )
    figures = json.loads((out / f"{name}.json").read_text())
    assert [one["policy"] for one in figures["policies"]] == content["policies"]
    colours = colours_of(out / f"{name}-{trade_off}.png")
    # a hollow mark and its legend for the first two policies
    assert min(colours[0x00, 0x72, 0xB2], colours[0xD5, 0x5E, 0x00]) > 20
    assert colours_of(out / f"{name}-over-time.png")[0x00, 0x72, 0xB2] > 500
    assert colours_of(out / f"{name}-timeline.png")[0x00, 0x72, 0xB2] > 5000
    assert len(list(out.glob("*.png"))) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "cellar"}, "kind"),
        ({"rates_per_s": []}, "rates_per_s"),
        ({"cv": -1}, "cv"),
        ({"night": 2}, "night: "),
        ({"trace": "t.csv"}, "sizes: given"),
        ({"repair_s": 3}, "allowed only with mtbf_s"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(
    cli: Cli, experiment: Path, changes: dict[str, object], message: str
) -> None:
    experiment.write_text(yaml.safe_dump({**yaml.safe_load(EXPERIMENT), **changes}))
    result = cli("simulate", experiment)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_experiments_of_one_name_and_a_folder_that_cannot_be_are_refused(
    cli: Cli, experiment: Path
) -> None:
    assert "different names" in cli("simulate", experiment, experiment).stderr
    blocked = experiment / "below"
    assert "--out" in cli("simulate", experiment, "--out", blocked).stderr


def test_what_looks_like_markup_is_shown_as_it_stands(
    cli: Cli, experiment: Path, tmp_path: Path
) -> None:
    text = EXPERIMENT.replace("One replica.", "'see [/foo] and [red]this'")
    experiment.write_text(text.replace("[1, 4]", "[1]"))
    result = cli("simulate", experiment, "--out", tmp_path / "[b] out", "--processes", 1)
    assert result.exit_code == 0, result.output
    assert "see [/foo] and [red]this" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_files_that_cannot_be_written_are_an_error_after_the_tables_were_shown(
    cli: Cli, experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "tiny.json").mkdir(parents=True)
    result = cli("simulate", experiment, "--out", tmp_path / "out", "--processes", 1)
    assert result.exit_code == 1
    assert "has run, but can't be written" in " ".join(result.stderr.split())
    assert "Done in time" in result.stdout


def test_workers_end_with_the_command_however_it_ends(experiment: Path, tmp_path: Path) -> None:
    long = EXPERIMENT.replace("duration_s: 5", "duration_s: 20000")
    experiment.write_text(long)
    command = [sys.executable, "-m", "ray_cluster.cli", "simulate", str(experiment)]
    with subprocess.Popen(
        [*command, "--processes", "1", "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            workers = wait_for_workers(process.pid)
            process.terminate()
            process.wait(timeout=60)
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert alive == []
        finally:
            process.kill()


def wait_for_workers(pid: int) -> list[psutil.Process]:
    """The processes below a command, once one of them is a worker that computes."""
    parent = psutil.Process(pid)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        below = parent.children(recursive=True)
        if any("spawn_main" in " ".join(one.cmdline()) for one in below):
            return below
        time.sleep(0.2)
    raise AssertionError("no worker came up")
