"""Finds, checks and loads discriminators."""

from __future__ import annotations

from pathlib import Path

import torch

from ray_cluster.engine.scorers.scorer import CalibratedScorer, RawScorer
from ray_cluster.engine.scorers.shapes import ShapesScorer
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_DISCRIMINATORS, discriminator_folder
from ray_cluster.models.cascade_curves import load_calibration
from ray_cluster.models.discriminators import load_discriminator


def load_scorer(
    model: str, device: torch.device, *, calibration: str | None = None
) -> CalibratedScorer:
    """Load a discriminator with its calibration.

    Args:
        model: a built-in discriminator, or a folder or hub id of a CLIP-type model or an image
            classifier.
        calibration: folder with a ``calibration.json``; the model's own by default.

    Raises:
        ConfigError: there is no such model, a file is missing or damaged, or it is not calibrated.
        ModelUnsupported: it is no such model.
    """
    folder = discriminator_folder(model)
    if folder is None:
        raise ConfigError(
            f"there is no discriminator {model!r}; built in are {', '.join(BUILTIN_DISCRIMINATORS)}"
        )
    found = load_calibration(folder if calibration is None else Path(calibration).expanduser())
    return CalibratedScorer(_load_builtin(folder, device), found)


def _load_builtin(folder: Path, device: torch.device) -> RawScorer:
    return ShapesScorer(load_discriminator(folder, device), device)
