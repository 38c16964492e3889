"""Exports a run's weights, measures them and writes the card, all beside the weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ray_cluster.quality.classifier import load_classifier
from ray_cluster.quality.measure import measure_classifier
from ray_cluster.reference_models.card import write_card
from ray_cluster.reference_models.card_tables import Figures
from ray_cluster.reference_models.evaluate import evaluate, options_for
from ray_cluster.reference_models.evaluate_parts import evaluate_control, evaluate_lora
from ray_cluster.reference_models.export import SHAPES_SD, WEIGHTS, export
from ray_cluster.reference_models.runs import Run
from ray_cluster.reference_models.scenes import STYLES
from ray_cluster.reference_models.stages import CONTROLS
from ray_cluster.reference_models.training_log import write_training

CLASSIFIER_SEED = 7002
CLASSIFIER = "attribute-classifier"


def measure(
    name: str, folder: Path, *, changes: Mapping[str, Any], report: Path | None = None
) -> Figures:
    """Measure a folder as the card of the built-in model or part of this name was.

    Args:
        name: of a built-in model or part; others are measured as shapes-sd is.
        folder: what to measure.
        changes: of the evaluation's options.
        report: where to write `evaluation.json` and `contact-sheet.png`; nowhere by default.
    """
    torch.set_num_threads(1)
    if name == CLASSIFIER:
        count = int(changes.get("prompts", 3000))
        seed = int(changes.get("seed", CLASSIFIER_SEED))
        return measure_classifier(load_classifier(folder), seed=seed, count=count)
    options = replace(options_for(name), **changes)
    if name in CONTROLS:
        return evaluate_control(folder, SHAPES_SD, CONTROLS[name], options=options, report=report)
    if name in STYLES:
        return evaluate_lora(folder, SHAPES_SD, name, options=options, report=report)
    return evaluate(folder, options=options, report=report)


def publish(name: str, run: Run, target: Path | None = None) -> Figures:
    """Write a run's weights, figures and card to the package's folder of this name, or to another.

    Raises:
        FileNotFoundError: the run is not finished.
    """
    torch.set_num_threads(1)
    folder = export(name, run, target or WEIGHTS / name)
    write_training(name, run, folder)
    figures = measure(name, folder, changes={}, report=None if name == CLASSIFIER else folder)
    write_card(name, figures.tables(), folder)
    return figures
