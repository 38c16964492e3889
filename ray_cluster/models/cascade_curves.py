"""What was measured of a cascade: deferral by threshold, and quality by deferral.

A file of curves is YAML or JSON::

    source: where the numbers are from
    deferral: {thresholds: [0, ..., 1], rates: [0, ..., 1]}
    quality: {name: FID, lower_is_better: true, deferral_rates: [0, ...], scores: [...]}
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import weights_folder
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve

FILE_NAME = "deferral.json"
"""Of the curves in the folder of a discriminator, or of its calibration."""
_SUFFIXES = (".json", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class CascadeCurves:
    """Curves of a cascade.

    Attributes:
        quality_name: of what is measured, such as FID.
        source: where the numbers are from.
    """

    deferral: DeferralCurve
    quality: QualityCurve
    quality_name: str
    source: str


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
    source: str = Field(min_length=10, description="machine, date and commit; page; or formula")


def load_curves(name_or_path: str | Path, folder: Path = Path()) -> CascadeCurves:
    """Load curves that come with the package, by their name, or any others from their file.

    Args:
        name_or_path: of curves or of a discriminator of the package; or a file, or a folder with a
            ``deferral.json``.
        folder: in which a relative path lies.

    Raises:
        ConfigError: there are none, or they say something that is not allowed; the message names
            the key, what was given and what is allowed.
    """
    text = str(name_or_path)
    path = _builtin_files().get(text, folder / text)
    if path.is_dir():
        path /= FILE_NAME
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"there are no curves {text!r}: give the path of a {', '.join(_SUFFIXES)} file, of a "
            f"folder with a {FILE_NAME}, or one of {', '.join(sorted(_builtin_files()))}"
        )
    try:
        read = CurvesFile.model_validate(read_mapping(path, "curves"))
    except ValidationError as error:
        raise ConfigError(f"the curves {path}: {describe(error, CurvesFile)}") from None
    quality = read.quality
    return CascadeCurves(read.deferral.curve(), quality.curve(), quality.name, read.source)


def _builtin_files() -> dict[str, Path]:
    """Return the files of the package, by name."""
    folder = Path(str(resources.files("ray_cluster.models") / "curve_data"))
    tables = {path.stem: path for path in folder.glob("*.yaml")}
    return tables | {path.parent.name: path for path in weights_folder().glob(f"*/{FILE_NAME}")}
