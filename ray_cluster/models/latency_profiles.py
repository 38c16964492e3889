"""Reads and writes latency profiles, and knows those that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError
from ray_cluster.policies.costs.latency import (
    FigureKind,
    LatencyProfile,
    LatencyRow,
    Operation,
    OperationKey,
    SizeCount,
    repeated_keys,
)

FORMAT = "ray-cluster latency profile 1"
_SUFFIX = ".yaml"
_SIZED = ("step", "image", "decode")


class ProfileSize(BaseModel):
    """Images of a further size in a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(ge=1, le=16384, description="pixels")
    height: int = Field(ge=1, le=16384, description="pixels")
    batch: int = Field(1, ge=1, le=4096, description="images")


class ProfileRow(BaseModel):
    """One figure; ``kind`` and ``source`` are the file's where they are left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operation: Operation
    seconds: float = Field(gt=0, le=86400, allow_inf_nan=False, description="of the whole batch")
    width: int = Field(0, ge=0, le=16384, description="pixels")
    height: int = Field(0, ge=0, le=16384, description="pixels")
    batch: int = Field(1, ge=1, le=4096, description="images")
    sp_degree: int = Field(1, ge=1, le=1024, description="devices that do it together")
    guidance: bool | None = Field(None, description="whether an image takes two rows; the file's")
    steps: int = Field(0, ge=0, le=1000, description="of an image; the file's")
    cv: float = Field(0.0, ge=0, allow_inf_nan=False, description="of repeated measurements")
    beside: tuple[ProfileSize, ...] = Field((), description="other sizes in the same model call")
    kind: FigureKind | None = None
    source: str | None = Field(None, min_length=10)

    @model_validator(mode="after")
    def _check_size(self) -> ProfileRow:
        has_size = self.width > 0 and self.height > 0
        if self.operation in _SIZED and not has_size:
            raise ValueError(f"{self.operation} needs width and height")
        if self.operation not in _SIZED and (self.width or self.height):
            raise ValueError(f"{self.operation} has no width and height; leave them out")
        if self.steps and self.operation != "image":
            raise ValueError(f"{self.operation} has no steps; only image does")
        if self.beside and self.operation != "step":
            raise ValueError(f"{self.operation} has nothing beside it; only step does")
        if len({one[:2] for one in self.sizes}) < len(self.sizes):
            raise ValueError("beside has other sizes than the row, each once; join equal ones")
        return self

    @property
    def sizes(self) -> tuple[SizeCount, ...]:
        """The images of its batch, by size."""
        others = (SizeCount(one.width, one.height, one.batch) for one in self.beside)
        return (SizeCount(self.width, self.height, self.batch), *others)


class ProfileFile(BaseModel):
    """A whole profile, as in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["ray-cluster latency profile 1"]
    model: str = Field(min_length=1)
    device: str = Field(min_length=1, description="such as H100, or cpu")
    kind: FigureKind
    source: str = Field(min_length=10, description="machine, date and commit; page; or formula")
    guidance: bool = Field(False, description="of the rows that do not say")
    steps: int = Field(0, ge=0, le=1000, description="of the images that do not say")
    rows: tuple[ProfileRow, ...] = Field(min_length=1)

    def profile(self, name: str) -> LatencyProfile:
        """The profile under a name.

        Raises:
            ValueError: rows repeat each other, or an image's steps are not known.
        """
        rows = tuple(self._row(row) for row in self.rows)
        for key in repeated_keys(rows):
            raise ValueError(f"rows: there are several for {key}; leave one")
        return LatencyProfile(name, self.model, self.device, rows)

    def _row(self, row: ProfileRow) -> LatencyRow:
        steps = (row.steps or self.steps) if row.operation == "image" else 0
        if row.operation == "image" and not steps:
            raise ValueError("rows: an image needs its steps, in the row or for the whole file")
        guided = self.guidance if row.guidance is None else row.guidance
        key = OperationKey(
            row.operation, sp_degree=row.sp_degree, uses_guidance=guided, num_steps=steps
        ).of_sizes(row.sizes)
        return LatencyRow(
            key, row.seconds, row.kind or self.kind, row.source or self.source, row.cv
        )


def load_profile(name_or_path: str | Path, folder: Path = Path()) -> LatencyProfile:
    """Load a profile that comes with the package, by its name, or any other from its file.

    Args:
        folder: in which a relative path lies.

    Raises:
        ConfigError: there is none, or it says something that is not allowed; the message names the
            key, what was given and what is allowed.
    """
    text = str(name_or_path)
    path = _folder() / f"{text}{_SUFFIX}" if text in builtin_profiles() else folder / text
    if path.suffix != _SUFFIX:
        raise ConfigError(
            f"there is no profile {text!r}: give the path of a {_SUFFIX} file, or one of "
            f"{', '.join(builtin_profiles())}"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ProfileFile.model_validate(content).profile(path.stem)
    except RecursionError:
        raise ConfigError(f"cannot read the profile {path}: it is nested too deeply") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the profile {path}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"the profile {path}: {describe(error, ProfileFile)}") from None
    except ValueError as error:
        raise ConfigError(f"the profile {path}: {error}") from None


def check_name(path: Path) -> None:
    """Refuse a file's name that `load_profile` would not take; ConfigError."""
    if path.suffix != _SUFFIX:
        raise ConfigError(f"a profile's file ends in {_SUFFIX}; given {str(path)!r}")


def save_profile(path: Path, profile: LatencyProfile) -> None:
    """Write a profile, to six digits; `load_profile` gives it back under the file's name."""
    check_name(path)
    first = profile.rows[0]
    content = {
        "format": FORMAT,
        "model": profile.model,
        "device": profile.device,
        "kind": first.kind,
        "source": first.source,
        "rows": [_plain(row, first) for row in profile.rows],
    }
    ProfileFile.model_validate(content).profile(profile.name)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    path.write_text(text, encoding="utf-8")


def builtin_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}")))


def _plain(row: LatencyRow, first: LatencyRow) -> dict[str, Any]:
    key = row.key
    plain: dict[str, Any] = {
        "operation": key.operation,
        "width": key.width_px,
        "height": key.height_px,
        "batch": key.batch,
        "beside": [
            {"width": one.width_px, "height": one.height_px, "batch": one.batch}
            for one in key.beside
        ],
        "sp_degree": key.sp_degree,
        "guidance": key.uses_guidance,
        "steps": key.num_steps,
        "seconds": float(f"{row.seconds:.6g}"),
        "cv": float(f"{row.cv:.3g}"),
    }
    usual: dict[str, Any] = {"width": 0, "height": 0, "beside": [], "sp_degree": 1}
    usual |= {"guidance": False, "steps": 0, "cv": 0.0}
    written = {name: value for name, value in plain.items() if usual.get(name) != value}
    if row.kind != first.kind:
        written["kind"] = row.kind
    if row.source != first.source:
        written["source"] = row.source
    return written


def _folder() -> Path:
    return Path(str(resources.files("ray_cluster.models") / "profile_data"))
