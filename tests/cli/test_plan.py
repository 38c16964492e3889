"""``ray-cluster plan size`` says how many replicas a workload needs."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cli.conftest import Cli

TASK = {
    "name": "small",
    "devices": [{"profile": "sdxl-h100", "price_per_hour": 2.5}],
    "sizes": [{"width": 512, "height": 512}],
    "rate_per_s": 1,
    "slo_s": 10,
    "duration_s": 10,
    "num_seeds": 1,
}


def test_it_names_the_fewest_replicas_their_price_and_what_binds(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(TASK))
    result = cli("plan", "size", path, "--processes", 1)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "(simulated)" in text
    assert "modelled" in text
    assert "2.50" in text
    assert "1: 100.0 %" in text


def test_a_trace_is_replayed_on_replicas_that_fail_and_the_figures_are_written(
    cli: Cli, tmp_path: Path
) -> None:
    path, out = tmp_path / "task.yaml", tmp_path / "plan.json"
    rows = [f"{n},sdxl,{512 + 256 * (n % 2)},512,30,9" for n in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,model,width,height,steps,slo_s", *rows]))
    task = {"name": "t", "devices": TASK["devices"], "trace": "t.csv", "num_seeds": 2}
    failing = {**task, "mtbf_s": 20, "repair_s": 5, "load_s": 5}
    found = []
    for content in (task, failing):
        path.write_text(yaml.safe_dump(content))
        result = cli("plan", "size", path, "--processes", 1, "--out", out)
        assert result.exit_code == 0, result.output
        (device,) = json.loads(out.read_text())["devices"]
        assert str(device["replicas"]) in result.stdout
        assert device["per_hour"] == 2.5 * device["replicas"]
        assert device["tried"][str(device["replicas"])] == device["attainment"]
        assert device["attainment"]["value"] >= 0.99
        found.append(device["replicas"])
    # every replica is away for a third of the time
    assert 1 <= found[0] < found[1]
    for changes, said in (
        ({"rate_per_s": 1}, "rate_per_s: given 1.0; not allowed with a trace"),
        ({"trace": "none.csv"}, "none.csv"),
        ({"load_s": 3}, "allowed only with mtbf_s"),
        ({"trace": None, "speed": 2}, "speed: given 2.0; not allowed without a trace"),
        ({"steps": 20}, "a trace says that itself"),
        ({**TASK, "trace": None, "model": "m"}, "allowed only with a trace"),
        ({"trace": None}, "sizes, rate_per_s and slo_s are needed, or a trace"),
    ):
        path.write_text(yaml.safe_dump({**task, **changes}))
        refused = cli("plan", "size", path)
        assert refused.exit_code == 1
        assert said in " ".join(refused.stderr.split())
    assert "a file in an existing folder" in cli("plan", "size", path, "--out", tmp_path).stderr


def test_a_task_that_is_wrong_is_refused_in_a_sentence(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump({**TASK, "attainment": 1.5}))
    result = cli("plan", "size", path)
    assert result.exit_code == 1
    assert "attainment" in result.stderr
    path.write_text(yaml.safe_dump({**TASK, "policy": "best"}))
    refused = cli("plan", "size", path).stderr
    assert "there is no policy 'best'" in refused
    assert "pydantic" not in refused
    path.write_text(yaml.safe_dump({**TASK, "rate_per_s": 1e6}))
    assert "10,000,000 a run" in cli("plan", "size", path).stderr
    path.write_text("[]")
    assert "keys and values" in cli("plan", "size", path).stderr
    assert "cannot read the task" in cli("plan", "size", tmp_path / "none.yaml").stderr


CASCADE = {
    "kind": "cascade",
    "name": "small",
    "high_per_s": 8,
    "duration_s": 20,
    "num_seeds": 1,
}


def test_a_cascade_is_sized_for_deadlines_and_quality(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "cascade.yaml"
    path.write_text(yaml.safe_dump({**CASCADE, "worst_quality": 18.5}))
    result = cli("plan", "size", path, "--processes", 1)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "(simulated, published times)" in text
    assert "(at least 2)" in text
    assert "light" in text
    for changes, said in (
        ({"num_gpus": 4}, "num_gpus is what is looked for"),
        ({"slo_s": 1}, "slo_s"),
        ({"policies": ["best"]}, "there is no policy 'best'"),
        ({"most_violations": 2}, "most_violations"),
    ):
        path.write_text(yaml.safe_dump({**CASCADE, **changes}))
        refused = cli("plan", "size", path)
        assert refused.exit_code == 1
        assert said in refused.stderr
