"""``generate`` in this process, with the real engine on a tiny random model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from ray_cluster.imaging.encoder import encode_image, read_recipe
from ray_cluster.requests import OutputSpec
from tests.cli.conftest import Cli
from tests.fakes import image_request

ROOT = Path(__file__).parents[2]


def opened(path: Path) -> Image.Image:
    return Image.open(io.BytesIO(path.read_bytes()))


def test_like_repeats_an_image_bit_for_bit(cli: Cli, tiny_config: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    options = ("--seed", 5, "--size", "96x64", "--steps", 4, "--guidance", 3.5)
    options += ("--sampler", "euler_ancestral", "--negative-prompt", "blau, grün, 蓝色")
    made = cli("generate", "a red circle", "--config", tiny_config, *options, "-o", first)
    assert made.exit_code == 0, made.output
    repeated = cli("generate", "--like", first, "--config", tiny_config, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert first.read_bytes() == again.read_bytes()
    assert opened(first).size == (96, 64)
    # the model has its name in that configuration only
    elsewhere = cli("generate", "--like", first, "-o", tmp_path / "elsewhere.png")
    assert elsewhere.exit_code == 1
    assert "'model' is 'tiny'" in elsewhere.stderr
    assert "with --config the configuration of the service that has it" in elsewhere.stderr


def test_options_override_the_recipe(cli: Cli, tiny_config: Path, tmp_path: Path) -> None:
    first, other = tmp_path / "first.png", tmp_path / "other.png"
    cli("generate", "a red circle", "--seed", 5, "--config", tiny_config, "-o", first)
    result = cli("generate", "--like", first, "--seed", 6, "--config", tiny_config, "-o", other)
    assert result.exit_code == 0, result.output
    recipes = [read_recipe(path.read_bytes()) for path in (first, other)]
    assert recipes[1] == {**recipes[0], "seed": "6"}
    assert first.read_bytes() != other.read_bytes()


def test_several_images_get_numbers_and_seeds(cli: Cli, tiny_config: Path, tmp_path: Path) -> None:
    result = cli(
        *("generate", "a red circle", "--seed", 7, "--n", 2, "--slo", 1000),
        *("--config", tiny_config, "-o", tmp_path / "a.webp"),
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.glob("*.webp")) == ["a-1.webp", "a-2.webp"]
    assert "seed 7" in result.output
    assert "seed 8" in result.output
    assert "within the deadline" in result.output
    assert opened(tmp_path / "a-2.webp").format == "WEBP"


def test_a_fidelity_is_fewer_steps_and_the_recipe_says_which(
    cli: Cli, tiny_config: Path, tmp_path: Path
) -> None:
    image, arguments = tmp_path / "a.png", ("generate", "a red circle", "--fidelity", "balanced")
    refused = cli(*arguments, "--config", tiny_config, "-o", image)
    assert refused.exit_code == 1
    assert "has not been measured" in refused.stderr
    content = yaml.safe_load(tiny_config.read_text())
    content["pools"][0]["fidelity"] = {
        "sampler": "ddim",
        "max_guidance_scale": 2.0,
        "steps": [{"asked": 3, "balanced": 2, "fast": 1}],
    }
    tiny_config.write_text(yaml.safe_dump(content))
    made = cli(*arguments, "--config", tiny_config, "-o", image)
    assert made.exit_code == 0, made.output
    assert "  balanced: 2 of 3 steps  " in made.stdout
    assert read_recipe(image.read_bytes())["num_inference_steps"] == "2"


def test_nothing_is_overwritten_without_force(cli: Cli, tiny_config: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.png"
    taken.write_bytes(b"mine")
    arguments = ("generate", "a red circle", "--config", tiny_config, "-o", taken)
    refused = cli(*arguments)
    assert refused.exit_code == 1
    assert "taken.png exists already" in refused.stderr
    assert taken.read_bytes() == b"mine"
    assert cli(*arguments, "--force").exit_code == 0
    assert opened(taken).size == (64, 64)


WRONG = {
    "no prompt": ([], "parameter 'prompt' is required"),
    "size": (["x", "--size", "63x64"], "parameter 'size' is 63x64"),
    "steps": (["x", "--steps", "999"], "(option --steps)"),
    "guidance": (["x", "--guidance", "99"], "(option --guidance)"),
    "number": (["x", "--n", "0"], "parameter 'n' must be at least 1"),
    "seed": (["x", "--seed", "-1"], "parameter 'seed' must be at least 0"),
    "compression": (["x", "--compression", "50"], "changes nothing with png"),
    "priority": (["x", "--priority", "1"], "changes nothing without other requests"),
    "allow": (["x", "--allow", "fidelity"], "changes nothing without other requests"),
    "min steps": (["x", "--min-steps", "1"], "changes nothing without other requests"),
    "negative prompt": (["x", "--negative-prompt", "y", "--guidance", "1"], "changes nothing"),
    "model": (["x", "--model", "nosuch"], "parameter 'model' is 'nosuch'"),
    "pool": (["x", "--pool", "nosuch"], "no pool 'nosuch'; there are ['tiny']"),
    "key": (["x", "--api-key", "k"], "--api-key changes nothing without --url"),
    "suffix": (["x", "-o", "a.gif"], "ends in '.gif'; allowed: .png"),
    "format": (["x", "-o", "a.png", "--format", "jpeg"], "named as png, but the format is jpeg"),
    "folder": (["x", "-o", "nosuch/a.png"], "there is no folder nosuch"),
    "like": (["--like", "nosuch.png"], "nosuch.png cannot be read"),
}


@pytest.mark.parametrize("case", WRONG, ids=list(WRONG))
def test_a_wrong_option_is_one_sentence(
    cli: Cli, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, sentence = WRONG[case]
    result = cli("generate", *arguments, "--config", tiny_config)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.png"))


def test_a_wrong_option_is_said_before_anything_heavy_is_imported(
    tiny_config: Path, tmp_path: Path
) -> None:
    script = """
import json, sys
from typer.testing import CliRunner
from ray_cluster.cli.app import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, ["generate", *arguments])
    heavy = [name for name in ("torch", "diffusers", "transformers", "ray") if name in sys.modules]
    print(json.dumps([result.exit_code, result.stderr, heavy]))
"""
    commands = [[*arguments, "--config", str(tiny_config)] for arguments, _ in WRONG.values()]
    commands.append(["x", "--size", "65x65"])
    answer = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    for line in answer.stdout.splitlines():
        code, message, heavy = json.loads(line)
        assert code == 1, message
        assert message.startswith("error: ")
        assert heavy == [], message
    assert len(answer.stdout.splitlines()) == len(commands)


def test_a_png_made_elsewhere_has_no_recipe(cli: Cli, tiny_config: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.png"
    Image.new("RGB", (64, 64)).save(foreign)
    result = cli("generate", "--like", foreign, "--config", tiny_config)
    assert result.exit_code == 1
    assert "carries no recipe of ray-cluster" in result.stderr


def test_an_image_with_reuse_is_not_repeated_without_it(cli: Cli, tmp_path: Path) -> None:
    made = tmp_path / "made.png"
    recipe = image_request().recipe() | {"reuse": "a schedule"}
    made.write_bytes(encode_image(np.zeros((64, 64, 3), np.uint8), OutputSpec(), recipe))
    result = cli("generate", "--like", made)
    assert result.exit_code == 1
    assert "made with blocks kept from earlier steps, as --fidelity allows" in result.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": "somebody/large-model"},
            "which may have to be downloaded; give it with --model",
        ),
        ({"loras": "[" * 100_000}, "loras is '[[["),
        ({"seed": "9" * 5000}, "seed is '999"),
    ],
)
def test_a_recipe_of_a_stranger_costs_a_sentence(
    cli: Cli, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    made = tmp_path / "made.png"
    recipe = image_request(model="shapes-sd").recipe() | changes
    made.write_bytes(encode_image(np.zeros((64, 64, 3), np.uint8), OutputSpec(), recipe))
    result = cli("generate", "--like", made)
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr) < 400


def test_a_folder_can_be_the_model(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    result = cli("generate", "a circle", "--model", tiny_model, "--steps", 2, "-o", image)
    assert result.exit_code == 0, result.output
    assert read_recipe(image.read_bytes())["model"] == str(tiny_model)
