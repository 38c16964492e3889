"""Exports a run's weights, measures them and writes the card, all beside the weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_DISCRIMINATORS
from ray_cluster.quality.classifier import load_classifier
from ray_cluster.quality.scenes import STYLES
from recipes.discriminators.classifier_figures import measure_classifier
from recipes.discriminators.figures import measure_discriminator
from recipes.export import SHAPES_SD, WEIGHTS, export
from recipes.figures.card import write_card, write_training
from recipes.figures.evaluate import evaluate, options_for
from recipes.figures.evaluate_parts import evaluate_controlnet, evaluate_lora
from recipes.figures.scoring import Figures
from recipes.runs import TrainingRun
from recipes.stages import CONTROLS, MODEL_STAGES

CLASSIFIER_SEED = 7002
CLASSIFIER = "attribute-classifier"
# enough for one of every size and kind
_LEAST_RENDERS = 100


def measure(
    name: str,
    folder: Path,
    *,
    changes: Mapping[str, Any],
    report: Path | None = None,
    kept: Path | None = None,
) -> Figures:
    """Measure a folder as the card of the built-in model or part of this name was.

    Args:
        name: of a built-in model or part; others are measured as shapes-sd is.
        folder: what to measure.
        changes: of the evaluation's options.
        report: where to write `evaluation.json` and `contact-sheet.png`; nowhere by default.
        kept: folder that keeps the images that discriminators are measured on.
    """
    torch.set_num_threads(1)
    if name == CLASSIFIER:
        return _measure_classifier(folder, changes, report)
    if name in BUILTIN_DISCRIMINATORS:
        return _measure_discriminator(name, folder, changes, report, kept)
    options = replace(options_for(name), **changes)
    if name in CONTROLS:
        return evaluate_controlnet(
            folder, SHAPES_SD, CONTROLS[name], options=options, report=report
        )
    if name in STYLES:
        return evaluate_lora(folder, SHAPES_SD, name, options=options, report=report)
    return evaluate(folder, options=options, report=report)


def _measure_classifier(folder: Path, changes: Mapping[str, Any], report: Path | None) -> Figures:
    if report is not None:
        raise ConfigError(f"{CLASSIFIER} has nothing to write with --out; leave it out")
    _check_changes(CLASSIFIER, changes)
    count = int(changes.get("prompts", 3000))
    if count < _LEAST_RENDERS:
        raise ConfigError(f"--prompts must be at least {_LEAST_RENDERS} here; given {count}")
    seed = int(changes.get("seed", CLASSIFIER_SEED))
    return measure_classifier(load_classifier(folder), seed=seed, count=count)


def _measure_discriminator(
    name: str, folder: Path, changes: Mapping[str, Any], report: Path | None, kept: Path | None
) -> Figures:
    _check_changes(name, changes)
    figures = measure_discriminator(folder, **changes, kept=kept)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        (report / "evaluation.json").write_text(figures.as_json(), encoding="utf-8")
    return figures


def _check_changes(name: str, changes: Mapping[str, Any]) -> None:
    if unused := sorted(changes.keys() - {"prompts", "seed"}):
        raise ConfigError(
            f"{', '.join(unused)} change nothing for {name}: give --prompts and --seed only"
        )


def publish(name: str, run: TrainingRun, target: Path | None = None) -> Figures:
    """Write a run's weights, figures and card to the package's folder of this name, or to another.

    They are made beside it and take its place when all of them are there: an error or a kill leaves
    what there was.

    Raises:
        FileNotFoundError: the run is not finished.
    """
    torch.set_num_threads(1)
    target = (target or WEIGHTS / name).absolute()
    _check_finished(name, run)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as made:
        folder = export(name, run, Path(made) / target.name)
        write_training(name, run, folder)
        report = None if name == CLASSIFIER else folder
        figures = measure(name, folder, changes={}, report=report, kept=run.folder.path)
        write_card(name, figures.tables(), folder)
        _swap(folder, target, before=Path(made) / "before")
    return figures


def _swap(folder: Path, target: Path, before: Path) -> None:
    """Put a folder in the place of another, which goes to `before`, or comes back if that fails."""
    if not target.exists():
        folder.rename(target)
        return
    target.rename(before)
    try:
        folder.rename(target)
    except BaseException:
        before.rename(target)
        raise


def _check_finished(name: str, run: TrainingRun) -> None:
    """Refuse a run whose last checkpoints are not those of finished stages."""
    for stage in MODEL_STAGES[name]:
        if run.folder.index(stage.name) == 0:
            continue
        trainer = stage.build(run)
        run.folder.restore(trainer)
        if not trainer.is_finished:
            raise FileNotFoundError(
                f"the stage {stage.name!r} in {run.folder.path} is at step {trainer.index} of "
                f"{trainer.total}; train it to its end"
            )
