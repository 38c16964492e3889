"""``models``: listing, and that training and evaluation get what the options say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.cli.models.model_list import card_lines
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.training import export, stages
from ray_cluster.training.runs import TrainingRun, open_run
from ray_cluster.training.stages import Stage
from tests.cli.conftest import Cli


def test_built_in_models_are_listed(cli: Cli) -> None:
    result = cli("models", "list")
    assert result.exit_code == 0, result.output
    assert "shapes-sd" in result.output
    assert "apache-2.0" in result.output


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_loses_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli("models", "list").output.splitlines()
    assert max(len(line) for line in lines) <= width
    # a line for each, and its sentence below
    assert any(re.match(r"shapes-sd +model +\d+\.\d MB  apache-2.0", line) for line in lines)
    card = builtin_folder("shapes-sd")
    assert card is not None
    assert str(card.parent) in "".join(line.strip() for line in lines)
    first_sentence = card_lines(card)[1]
    assert set(first_sentence.split()) <= set(" ".join(lines).split())


def test_served_models_are_listed(cli: Cli, service_url: str) -> None:
    result = cli("models", "list", "--url", service_url, "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "shapes " in result.output
    served = result.output.partition("served at")[2]
    assert max(len(line) for line in served.splitlines()) <= 80
    assert "32 to 128 px" in result.output


def test_the_card_tells_licence_and_first_sentence(tmp_path: Path) -> None:
    assert card_lines(tmp_path) == ("-", "-")
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n\n# Shapes\n\nA model. More.\n")
    assert card_lines(tmp_path) == ("apache-2.0", "A model")
    card.write_text("# Shapes\n\n![a](b.png)\n\nDraws\nshapes. More.\n\nLicence: Apache-2.0.\n")
    assert card_lines(tmp_path) == ("Apache-2.0", "Draws shapes")
    card.write_text("# Shapes only\n")
    assert card_lines(tmp_path) == ("-", "-")


class Training:
    """Stands in for the training and the export, and notes what they were asked for."""

    def __init__(self, *, is_finished: bool = True) -> None:
        self.is_finished = is_finished
        self.asked: dict[str, Any] = {}

    def train(self, run: TrainingRun, chosen: Sequence[Stage], minutes: float | None) -> bool:
        self.asked = {"run": run, "stages": [stage.name for stage in chosen], "minutes": minutes}
        return self.is_finished

    def export(self, model: str, run: TrainingRun, target: Path) -> Path:
        self.asked["exported"] = (model, target)
        return target


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    fake = Training()
    monkeypatch.setattr(stages, "train", fake.train)
    monkeypatch.setattr(export, "export", fake.export)
    return fake


def test_training_gets_its_options(cli: Cli, training: Training, tmp_path: Path) -> None:
    result = cli(
        *("models", "train", "shapes-sd", "--out", tmp_path / "run", "--minutes", 2, "--seed", 9),
        *("--stage", "denoiser", "--stage", "text", "--export", tmp_path / "model"),
    )
    assert result.exit_code == 0, result.output
    assert training.asked["run"].folder.path == tmp_path / "run"
    assert training.asked["run"].base is None
    assert training.asked["minutes"] == 2
    assert training.asked["run"].recipe.seed == 9
    # in the order in which they build on each other
    assert training.asked["stages"] == ["text", "denoiser"]
    assert training.asked["exported"] == ("shapes-sd", tmp_path / "model")


def test_other_models_build_on_the_first(cli: Cli, training: Training, tmp_path: Path) -> None:
    result = cli("models", "train", "outline", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert training.asked["stages"] == ["outline"]
    assert training.asked["run"].base == builtin_folder("shapes-sd")


def test_an_interrupted_training_says_how_to_go_on(
    cli: Cli, training: Training, tmp_path: Path
) -> None:
    training.is_finished = False
    result = cli("models", "train", "shapes-sd", "--out", tmp_path, "--export", tmp_path / "m")
    assert result.exit_code == 0
    assert "the same command goes on" in result.output
    assert "exported" not in training.asked


def test_a_run_can_be_made_to_wait(cli: Cli, tmp_path: Path) -> None:
    open_run(tmp_path)
    arguments = ("models", "train", "shapes-sd", "--out", tmp_path)
    assert cli(*arguments, "--pause").exit_code == 0
    assert (tmp_path / "PAUSE").exists()
    assert cli(*arguments, "--resume-run").exit_code == 0
    assert not (tmp_path / "PAUSE").exists()


def test_a_folder_that_is_no_run_stays_as_it_was(cli: Cli, tmp_path: Path) -> None:
    for arguments in (("publish", "outline", "--run"), ("train", "outline", "--pause", "--out")):
        result = cli("models", *arguments, tmp_path)
        assert (result.exit_code, result.stderr.count("there is no run in")) == (1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "sdxl"], "'sdxl' cannot be trained here"),
        (["train", "shapes-sd", "--stage", "vae"], "there is no stage vae; the stages are"),
        (["train", "shapes-sd", "--device", "abacus"], "--device abacus: "),
        (["train", "shapes-sd", "--pause", "--resume-run"], "contradict each other"),
        (["train", "shapes-sd", "--pause", "--out", "nosuch"], "there is no run in nosuch"),
        (["publish", "sdxl"], "'sdxl' cannot be trained here"),
        (["publish", "shapes-sd", "--run", "nosuch"], "there is no run in nosuch"),
        (["evaluate", "nosuch"], "'nosuch' is neither built in"),
        (["list", "--api-key", "k"], "changes nothing without --url"),
    ],
)
def test_a_wrong_option_is_one_sentence(cli: Cli, arguments: list[str], sentence: str) -> None:
    result = cli("models", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr


def test_evaluation_measures_and_writes(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        *("models", "evaluate", "shapes-sd", "--prompts", 2, "--repeats", 1),
        *("--other-prompts", 2, "--bare-prompts", 2),
        *("--steps", 2, "--seed", 3, "--guidance", 1.0, "--out", tmp_path),
    )
    assert result.exit_code == 0, result.output
    options = json.loads((tmp_path / "evaluation.json").read_text())["options"]
    assert (options["prompts"], options["seed"], options["steps"]) == (2, 3, 2)
    assert (tmp_path / "contact-sheet.png").exists()
