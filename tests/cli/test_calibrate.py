"""``models calibrate`` measures a model, goes on where it was, and a pool serves its table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from ray_cluster.api.input.validation import validate
from ray_cluster.api.output.reply_writer import fidelity_of
from ray_cluster.api.resolve.generation import resolve
from ray_cluster.cli.models import calibrate_run
from ray_cluster.cli.models.config_edit import with_fidelity
from ray_cluster.config.loading import load_config
from ray_cluster.engine.device.timing import TimedImages, make_timed
from ray_cluster.engine.models.loading import load_model
from ray_cluster.errors import ConfigError
from ray_cluster.policies.steps.reuse import ReuseSchedule
from tests.cli.conftest import Cli

SMALL = ("--quick", "--images", 1, "--steps", 4)
TABLE = {
    "sampler": "ddim",
    "max_guidance_scale": 2.0,
    "steps": [
        {
            "asked": 4,
            "balanced": 3,
            "fast": 2,
            "balanced_reuse": {"steps": 4, "reuse": "outer2-every2", "cost": 0.6, "ssim": 0.96},
        }
    ],
}


def test_it_writes_a_table_and_a_report_and_goes_on_where_it_was(
    cli: Cli, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "out", list[int]()

    def stopping(*arguments: Any) -> TimedImages:
        made.append(len(arguments[1]))
        if len(made) == 4:
            raise KeyboardInterrupt
        return make_timed(*arguments)

    monkeypatch.setattr(calibrate_run, "make_timed", stopping)
    command = ("models", "calibrate", "tiny", "--write", tiny_config, "--out", out, *SMALL)
    before = tiny_config.read_text()
    assert cli(*command).exit_code != 0
    kept = {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.npz")}
    # the first one warms up
    assert len(kept) == 2
    assert tiny_config.read_text() == before
    result = cli(*command)
    assert result.exit_code == 0, result.output
    after = {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.npz")}
    assert kept.items() <= after.items()
    assert {"report.md", "frontier.png", "images.png"} <= {path.name for path in out.iterdir()}
    num_made = len(made)
    assert cli(*command).exit_code == 0
    assert len(made) == num_made
    other = cli(*command, "--guidance", 3)
    assert "made with other settings" in other.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--steps", "1,x"), "--steps 1,x: write whole numbers from 2 to 100"),
        (("--size", "63x64"), "--size 63x64: write WIDTHxHEIGHT, sides"),
        (("--sampler", "best"), "--sampler best: this model offers ddim"),
        (("--prompts", "/nowhere"), "--prompts /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    cli: Cli, tiny_config: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    result = cli(
        "models", "calibrate", "tiny", "--config", tiny_config, "-o", tmp_path / "out", *options
    )
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())


def test_only_the_pools_table_changes_in_a_file() -> None:
    text = (
        "# ours\npools:\n  - name: a  # first\n    model: x\n    fidelity:\n      steps: []\n"
        "    # kept\n    replicas: 2\n\n  - {name: c, model: z}\n"
        "  - name: b\n    model: y\nhttp: {}\n"
    )
    changed = with_fidelity(text, "a", {"sampler": "ddim"})
    assert changed == text.replace("steps: []", "sampler: ddim")
    changed = with_fidelity(text, "b", {"sampler": "ddim"})
    assert changed == text.replace("model: y\n", "model: y\n    fidelity:\n      sampler: ddim\n")
    with pytest.raises(ConfigError, match="paste the table"):
        with_fidelity(text, "c", {"sampler": "ddim"})


def test_a_pool_serves_what_its_table_says(cli: Cli, tiny_config: Path, tmp_path: Path) -> None:
    """The image of the whole path is that of the engine's own reuse, and no exact one."""
    text = with_fidelity(tiny_config.read_text(), "tiny", TABLE)
    tiny_config.write_text(text)
    [pool] = load_config(tiny_config).pools
    model = load_model(pool)
    body = {"prompt": "a red circle", "seed": 5, "num_inference_steps": 4}

    def request_of(**changes: Any) -> Any:
        fields = validate(body | changes)
        return resolve(fields, model.profile, load_config(tiny_config).limits)[0]

    request, exact = request_of(fidelity="balanced"), request_of()
    assert request.reuse is not None
    assert request.view(arrival_s=0, deadline_s=1).step_share == 0.6
    reply = fidelity_of(request)
    assert (reply.got, reply.steps_computed, reply.steps_reused) == ("balanced", 2, 2)
    assert (reply.max_ssim_loss, reply.budget_spent) == (0.05, 0.8)
    made = make_timed(model, [request], time.perf_counter)
    assert made.is_reused == (False, True, False, True)
    assert (made.images != make_timed(model, [exact], time.perf_counter).images).any()
    # what may be degraded has steps that admission can shorten
    allowed = request_of(fidelity="balanced", allow=["fidelity"])
    assert (allowed.reuse, allowed.num_steps, allowed.fewest_steps) == (None, 3, 2)
    path = tmp_path / "a.png"
    result = cli(
        *("generate", "a red circle", "--config", tiny_config, "--seed", 5, "--steps", 4),
        *("--fidelity", "balanced", "-o", path),
    )
    assert result.exit_code == 0, result.output
    assert "balanced: 4 of 4 steps, 2 of them reused" in result.stdout
    image = Image.open(path)
    assert np.abs(np.asarray(image).astype(int) - made.images[0]).max() <= 1
    assert image.info["ray_cluster:reuse"] == str(ReuseSchedule(2, 2))


@pytest.mark.parametrize(
    ("reuse", "said"),
    [
        ("outer99-every2", "can compute 1 to"),
        ("outer2-every1", "is no reuse schedule"),
        ("deep", "is no reuse schedule"),
    ],
)
def test_a_schedule_that_the_model_cannot_run_is_refused_with_the_configuration(
    cli: Cli, tiny_config: Path, reuse: str, said: str
) -> None:
    content = yaml.safe_load(tiny_config.read_text())
    row = {**TABLE["steps"][0], "balanced_reuse": {"steps": 4, "reuse": reuse, "cost": 1}}
    row["balanced_reuse"]["ssim"] = 0.96
    content["pools"][0]["fidelity"] = {**TABLE, "steps": [row]}
    tiny_config.write_text(yaml.safe_dump(content))
    result = cli("config", tiny_config)
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())
