"""Runs and folders that are not as they should be are refused, and what there is stays."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ray_cluster.errors import ConfigError
from recipes.figures.evaluate import EvaluationOptions, evaluate, load_pipeline
from recipes.publish import measure, publish
from recipes.runs import is_run, open_run
from recipes.stages import find_stage
from recipes.trainer import run_stage
from tests.recipes.tiny import tiny_run


def test_a_stage_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with run.folder.locked("text"):
        trainer = find_stage("shapes-sd", "text").build(run)
        with pytest.raises(ConfigError, match="another training works at the stage 'text'"):
            run_stage(trainer, run.folder, threading.Event())
        # others of the run go on
        codec = find_stage("shapes-sd", "codec").build(run)
        assert run_stage(codec, run.folder, threading.Event())
    assert run_stage(trainer, run.folder, threading.Event())


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80\x04]q"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    run = tiny_run(tmp_path)
    checkpoint = run.folder.checkpoint("text")
    checkpoint.write_bytes(content)
    trainer = find_stage("shapes-sd", "text").build(run)
    with pytest.raises(ConfigError, match=r"text\.pt is damaged.*delete it"):
        run.folder.restore(trainer)


def test_a_base_that_is_none_begins_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a diffusers folder"):
        open_run(tmp_path / "run", base=tmp_path)
    assert not is_run(tmp_path / "run")


@pytest.mark.parametrize("content", ["", "{}", '{"seed": "x", "base": null}', "[]"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"cannot read .*run\.json"):
        open_run(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot begin a run in"):
        open_run(file / "run")


def test_an_unfinished_run_is_not_published_and_leaves_what_there_is(
    tmp_path: Path, tiny_base: Path
) -> None:
    run = tiny_run(tmp_path / "run", base=tiny_base, model="outline")
    trainer = find_stage("outline", "outline").build(run)
    trainer.step()
    run.folder.save(trainer)
    target = tmp_path / "published"
    target.mkdir()
    (target / "README.md").write_text("what there is")
    with pytest.raises(FileNotFoundError, match=r"'outline'.* is at step 1 of"):
        publish("outline", run, target)
    assert [one.name for one in tmp_path.iterdir() if "published" in one.name] == ["published"]
    assert (target / "README.md").read_text() == "what there is"


def test_a_damaged_model_and_too_few_pictures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the model in"):
        load_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ConfigError, match="cannot load the model in"):
        load_pipeline(tmp_path)
    with pytest.raises(ConfigError, match="two pictures or more"):
        evaluate(tmp_path, options=EvaluationOptions(prompts=1, repeats=1))


@pytest.mark.parametrize("changes", [{"steps": 9}, {"prompts": 4}, {"repeats": 2}])
def test_the_classifier_is_measured_by_what_it_has_only(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        measure("attribute-classifier", tmp_path, changes=changes)
    with pytest.raises(ConfigError, match="nothing to write"):
        measure("attribute-classifier", tmp_path, changes={}, report=tmp_path)
