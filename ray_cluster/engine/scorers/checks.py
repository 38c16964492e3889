"""Finds discriminators and checks their files, before any weight is loaded."""

from __future__ import annotations

from pathlib import Path

from ray_cluster.engine.files.folders import resolve_single
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_DISCRIMINATORS, discriminator_folder
from ray_cluster.models.cascade_curves import CALIBRATION, Calibration, load_calibration
from ray_cluster.models.local import scorer_digest

_DOWNLOADED = ("*.json", "*.txt", "*.model", "*.safetensors")


def check_scorer(model: str, *, calibration: str | None = None) -> Calibration:
    """Return the calibration of a discriminator, without loading its weights.

    Arguments and errors as of :func:`ray_cluster.engine.scorers.loading.load_scorer`.
    """
    folder = resolve_scorer(model)
    place = folder if calibration is None else Path(calibration).expanduser()
    if not (place / CALIBRATION).is_file():
        raise ConfigError(
            f"discriminator {model!r} is not calibrated: there is no {place / CALIBRATION}; make "
            "it with: ray-cluster models calibrate-cascade CONFIG"
        )
    found = load_calibration(place)
    if found.scorer_sha256 not in {"", scorer_digest(folder)}:
        raise ConfigError(
            f"{place / CALIBRATION} was made for other files than those of {model!r}; make it anew "
            "with: ray-cluster models calibrate-cascade CONFIG"
        )
    return found


def resolve_scorer(model: str) -> Path:
    """Return the local folder of a discriminator, downloaded if needed.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    return resolve_single(
        model,
        discriminator_folder(model),
        what="discriminator",
        allowed=f"one of {', '.join(BUILTIN_DISCRIMINATORS)}, or a folder or hub id of a CLIP-type "
        "model or an image classifier",
        patterns=_DOWNLOADED,
    )
