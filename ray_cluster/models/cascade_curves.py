"""What a cascade is calibrated with: a discriminator's logistic, and curves over deferral.

A file of curves is YAML or JSON::

    source: where the numbers are from
    deferral: {thresholds: [0, ..., 1], rates: [0, ..., 1]}
    quality: {name: FID, lower_is_better: true, deferral_rates: [0, ...], scores: [...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_DISCRIMINATORS, discriminator_folder
from ray_cluster.models.json_files import read_object
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve

CALIBRATION = "calibration.json"
DEFERRAL = "deferral.json"
_SUFFIXES = (".json", ".yaml", ".yml")


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


@dataclass(frozen=True, slots=True)
class CascadeCurves:
    """What was measured of a cascade.

    Attributes:
        quality_name: of what is measured, such as FID.
        source: where the numbers are from; empty if nobody says.
    """

    deferral: DeferralCurve
    quality: QualityCurve
    quality_name: str = "quality"
    source: str = ""


class DeferralPoints(BaseModel):
    """Share of the light images below a threshold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    thresholds: tuple[float, ...] = Field(description="rising from 0 to 1")
    rates: tuple[float, ...] = Field(description="rising from 0 to 1")

    @model_validator(mode="after")
    def _check(self) -> DeferralPoints:
        self.curve()
        return self

    def curve(self) -> DeferralCurve:
        """As a policy takes it; ValueError if it is none."""
        return DeferralCurve(self.thresholds, self.rates)


class QualityPoints(BaseModel):
    """Quality of all images at a share that the heavy model makes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "quality",
        max_length=40,
        pattern=r"^[A-Za-z][ -~]*$",
        description="of what is measured: a letter, then plain letters, digits and signs",
    )
    lower_is_better: bool
    deferral_rates: tuple[float, ...] = Field(description="rising from 0")
    scores: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> QualityPoints:
        self.curve()
        return self

    def curve(self) -> QualityCurve:
        """As a policy takes it; ValueError if it is none."""
        return QualityCurve(self.deferral_rates, self.scores, self.lower_is_better)


class CurvesFile(BaseModel):
    """A whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deferral: DeferralPoints
    quality: QualityPoints
    source: str = Field("", description="machine, date and commit; page; or formula")
    about: dict[str, Any] = Field({}, description="what they were measured on, for readers")


def load_curves(source: str | Path, folder: Path = Path()) -> CascadeCurves:
    """Return a cascade's curves.

    Args:
        source: a file, a folder with a ``deferral.json``, a built-in discriminator, or a published
            cascade by name.
        folder: in which a relative path lies.

    Raises:
        ConfigError: the file cannot be read, or says something that is not allowed; the message
            names the key, what was given and what is allowed.
    """
    text, published = str(source), _published()
    path = published.get(text) or discriminator_folder(text) or folder / Path(text).expanduser()
    if path.is_dir():
        path /= DEFERRAL
    if path.suffix not in _SUFFIXES:
        names = ", ".join((*BUILTIN_DISCRIMINATORS, *sorted(published)))
        raise ConfigError(
            f"there are no curves {text!r}: give the path of a {', '.join(_SUFFIXES)} file, of a "
            f"folder with a {DEFERRAL}, or one of {names}"
        )
    try:
        read = CurvesFile.model_validate(read_mapping(path, "curves"))
    except ValidationError as error:
        raise ConfigError(f"the curves {path}: {describe(error, CurvesFile)}") from None
    quality = read.quality
    return CascadeCurves(read.deferral.curve(), quality.curve(), quality.name, read.source)


def _published() -> dict[str, Path]:
    """Return the files of published cascades, by name."""
    folder = Path(str(resources.files("ray_cluster.models") / "curve_data"))
    return {path.stem: path for path in folder.glob("*.yaml")}


def save_curves(curves: CascadeCurves, path: Path, about: Mapping[str, Any]) -> None:
    """Write a cascade's curves; `load_curves` gives them back.

    Args:
        about: what they were measured on, for readers.
    """
    quality = {"name": curves.quality_name, **asdict(curves.quality)}
    content = {"source": curves.source, "about": dict(about)}
    _write(path, {**content, "deferral": asdict(curves.deferral), "quality": quality})


def _unusable(path: Path, error: Exception, wanted: str) -> ConfigError:
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(
        f"{path} cannot be used ({reason}): it must have {wanted}; make it anew with "
        "models calibrate-cascade"
    )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
