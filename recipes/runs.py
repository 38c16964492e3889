"""A training run: the recipe, the working folder, the model it builds on, and the device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ray_cluster.errors import ConfigError
from recipes.recipe import Recipe
from recipes.trainer import RunFolder

_SETTINGS = "run.json"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainingRun:
    """What every stage of a run is built from.

    Attributes:
        recipe: all numbers.
        folder: checkpoints and logs.
        base: a finished diffusers folder; what the run has not trained itself is taken from there.
        device: where networks and pictures live. Random numbers are drawn on the CPU, so that they
            are the same everywhere.
    """

    recipe: Recipe
    folder: RunFolder
    base: Path | None = None
    device: torch.device = CPU

    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Standard normal noise of this shape, on the run's device."""
        return torch.randn(tuple(shape), generator=generator).to(self.device)


def is_run(path: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (path / _SETTINGS).is_file()


def open_run(
    path: Path,
    *,
    recipe: Recipe | None = None,
    seed: int | None = None,
    base: Path | None = None,
    device: torch.device = CPU,
    checkpoint_seconds: float = 60.0,
) -> TrainingRun:
    """Begin a run in a folder, or go on with the one that is there.

    Args:
        path: working folder, made if absent.
        recipe: all numbers; the committed recipe by default.
        seed: instead of the recipe's.
        base: a finished diffusers folder to build on.
        device: where to train.
        checkpoint_seconds: time between checkpoints.

    Raises:
        ConfigError: the folder's run has another seed or another base, the base is no diffusers
            folder, or the folder can't be used.
    """
    if base is not None and not (base / "model_index.json").is_file():
        raise ConfigError(f"--base {base} is not a diffusers folder: it has no model_index.json")
    recipe = recipe or Recipe()
    settings, stored = path / _SETTINGS, dict[str, object]()
    if settings.is_file():
        stored = _read_settings(settings)
    given = {"seed": seed, "base": None if base is None else str(base.resolve())}
    for name, value in given.items():
        if stored and value is not None and value != stored[name]:
            raise ConfigError(
                f"the run in {path} has {name} {stored[name]}, not {value}; leave --{name} out to "
                "go on with it, or give a new run another folder with --out"
            )
    if not stored:
        stored = {"seed": recipe.seed if seed is None else seed, "base": given["base"]}
        _begin(path, stored)
    chosen = None if stored["base"] is None else Path(str(stored["base"]))
    folder = RunFolder(path, checkpoint_seconds)
    return TrainingRun(replace(recipe, seed=int(str(stored["seed"]))), folder, chosen, device)


def _read_settings(path: Path) -> dict[str, object]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {"seed": int(stored["seed"]), "base": stored["base"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error!r}; give a folder with a run") from None


def _begin(path: Path, settings: dict[str, object]) -> None:
    """Write a new run's settings; a kill leaves all of them or none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        unfinished = path / f"{_SETTINGS}.part"
        unfinished.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        unfinished.replace(path / _SETTINGS)
    except OSError as error:
        raise ConfigError(f"cannot begin a run in {path}: {error}") from None
