"""``python -m recipes``: training, publishing and measuring get what the options say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.models.builtin import builtin_folder
from recipes import export, stages
from recipes.__main__ import main
from recipes.runs import TrainingRun
from recipes.stages import Stage


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Notes what training and export are asked for."""
    noted: dict[str, Any] = {}

    def train(run: TrainingRun, chosen: Sequence[Stage], minutes: float | None) -> bool:
        noted.update(run=run, stages=[one.name for one in chosen], minutes=minutes)
        return minutes is not None

    monkeypatch.setattr(stages, "train", train)
    monkeypatch.setattr(export, "export", lambda *given: noted.update(exported=given[::2]))
    return noted


def test_training_gets_its_options(asked: dict[str, Any], tmp_path: Path) -> None:
    out, model = tmp_path / "run", tmp_path / "model"
    options = ["--out", str(out), "--minutes", "2", "--seed", "9", "--export", str(model)]
    main(["train", "shapes-sd", *options, "--stage", "denoiser", "--stage", "text"])
    assert (asked["run"].folder.path, asked["run"].base) == (out, None)
    assert (asked["minutes"], asked["run"].recipe.seed) == (2, 9)
    # in the order in which they build on each other
    assert asked["stages"] == ["text", "denoiser"]
    assert asked["exported"] == ("shapes-sd", model)


def test_other_models_build_on_the_first_and_a_stopped_run_exports_nothing(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    main(["train", "outline", "--out", str(tmp_path), "--export", str(tmp_path / "m")])
    assert (asked["stages"], asked["run"].base) == (["outline"], builtin_folder("shapes-sd"))
    assert "exported" not in asked


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "shapes-sd", "--stage", "vae"], "there is no stage"),
        (["train", "shapes-sd", "--device", "tpu"], "--device tpu: "),
        (["publish", "shapes-sd", "--run", "nosuch"], "there is no run in nosuch"),
        (["evaluate", "nosuch"], "'nosuch' is neither built in"),
        (["evaluate", "shapes-sd", "--steps", "0"], "--steps 0: must be from 1 to 1000"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=f"error: {sentence}"):
        main(arguments)


def test_evaluation_measures_and_writes(tmp_path: Path) -> None:
    options = ["--prompts", "2", "--repeats", "1", "--other-prompts", "2", "--bare-prompts", "2"]
    options += ["--steps", "2", "--seed", "3", "--guidance", "1.0", "--out", str(tmp_path)]
    main(["evaluate", "shapes-sd", *options])
    found = json.loads((tmp_path / "evaluation.json").read_text())["options"]
    assert (found["prompts"], found["seed"], found["steps"]) == (2, 3, 2)
    assert (tmp_path / "contact-sheet.png").exists()
