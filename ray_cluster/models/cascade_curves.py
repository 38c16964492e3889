"""What a cascade is calibrated with: a discriminator's logistic, and its curves over deferral."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import discriminator_folder
from ray_cluster.models.json_files import read_object
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve

CALIBRATION = "calibration.json"
DEFERRAL = "deferral.json"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Makes confidences of a discriminator's scores: their logistic, scaled and shifted.

    Attributes:
        scorer_sha256: digest of the discriminator's files; empty where they are beside it.
        label: of an image classifier, which says that an image is right; else None.
    """

    scale: float
    shift: float
    scorer_sha256: str = ""
    label: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift) and self.scale > 0):
            raise ValueError(
                f"a calibration has a positive scale and a shift; given {self.scale}, {self.shift}"
            )

    def confidence(self, score: float) -> float:
        """Return the confidence in [0, 1] of a score; 0 of one that is not a number."""
        logit = self.scale * score + self.shift
        if math.isnan(logit):
            return 0.0
        # beyond, exp overflows
        return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))


def load_calibration(folder: Path) -> Calibration:
    """Return the calibration in a folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / CALIBRATION
    content = read_object(path)
    try:
        label = content.get("label")
        return Calibration(
            float(content["scale"]),
            float(content["shift"]),
            str(content["scorer_sha256"]),
            None if label is None else str(label),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, error, "scale, shift and scorer_sha256") from error


def save_calibration(calibration: Calibration, folder: Path) -> None:
    """Write a calibration into a folder."""
    _write(folder / CALIBRATION, asdict(calibration))


class CascadeCurves(NamedTuple):
    """What a discriminator's calibration measured of a cascade."""

    deferral: DeferralCurve
    quality: QualityCurve


def load_curves(source: str | Path) -> CascadeCurves:
    """Return a cascade's curves.

    Args:
        source: a file, a folder with a ``deferral.json``, or a built-in discriminator.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    path = discriminator_folder(str(source)) or Path(source).expanduser()
    if path.is_dir():
        path /= DEFERRAL
    content = read_object(path)
    try:
        deferral, quality = content["deferral"], content["quality"]
        is_lower_better = quality["lower_is_better"]
        if not isinstance(is_lower_better, bool):
            raise TypeError(f"lower_is_better is {is_lower_better!r}, not true or false")
        return CascadeCurves(
            DeferralCurve(_numbers(deferral["thresholds"]), _numbers(deferral["rates"])),
            QualityCurve(
                _numbers(quality["deferral_rates"]), _numbers(quality["scores"]), is_lower_better
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        wanted = (
            "deferral with thresholds and rates, and quality with deferral_rates, scores and "
            "lower_is_better"
        )
        raise _unusable(path, error, wanted) from error


def save_curves(curves: CascadeCurves, path: Path, about: Mapping[str, Any]) -> None:
    """Write a cascade's curves.

    Args:
        about: what they were measured on, for readers.
    """
    content = {"deferral": asdict(curves.deferral), "quality": asdict(curves.quality)}
    _write(path, {"about": dict(about), **content})


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list of numbers")
    return tuple(float(value) for value in values)


def _unusable(path: Path, error: Exception, wanted: str) -> ConfigError:
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(
        f"{path} cannot be used ({reason}): it must have {wanted}; make it anew with "
        "models calibrate-cascade"
    )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
