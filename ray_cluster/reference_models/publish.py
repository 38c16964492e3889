"""Exports a run's weights, measures them and writes the card, all beside the weights."""

from pathlib import Path

import torch

from ray_cluster.quality.classifier import load_classifier
from ray_cluster.quality.measure import measure_classifier
from ray_cluster.reference_models.card import write_card, write_classifier_card
from ray_cluster.reference_models.evaluate import Evaluation, evaluate
from ray_cluster.reference_models.export import SHAPES_SD, export, export_classifier

CLASSIFIER_SEED = 7002


def publish(run: Path, target: Path = SHAPES_SD) -> Evaluation:
    """Write weights, `evaluation.json`, `contact-sheet.png` and `README.md` to `target`.

    The attribute classifier is exported to its own folder first, since it does the measuring.
    """
    torch.set_num_threads(1)
    file = export_classifier(run)
    figures = measure_classifier(load_classifier(), seed=CLASSIFIER_SEED, count=3000)
    write_classifier_card(run, figures, file)
    evaluation = evaluate(export(run, target), report=target)
    write_card(run, evaluation, target)
    return evaluation
