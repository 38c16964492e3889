"""Trains and measures the built-in models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_cluster.cli.commands import command
from ray_cluster.cli.output import stdout
from ray_cluster.errors import ConfigError
from ray_cluster.reference_models.registry import BUILTIN_MODELS, builtin_folder

if TYPE_CHECKING:
    from ray_cluster.reference_models.train import StageName

_PAUSE = "PAUSE"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What ``models train`` was asked for.

    Attributes:
        out: the run's working folder; None takes the usual one.
        minutes: time after which each stage's final decay begins.
        stages: empty for all.
        export: where to write a diffusers folder when all is done.
    """

    name: str
    out: Path | None
    minutes: float | None
    seed: int | None
    stages: tuple[str, ...]
    export: Path | None


def train_model(options: TrainingOptions) -> str:
    """Train, or go on with, a run; return what to do next.

    Raises:
        ConfigError: there is no such model or stage, or a stage lacks the one before it.
    """
    from ray_cluster.reference_models.export import export
    from ray_cluster.reference_models.recipe import Recipe
    from ray_cluster.reference_models.train import STAGES, train

    run = run_folder(options.name, options.out)
    recipe = Recipe() if options.seed is None else replace(Recipe(), seed=options.seed)
    stages = _stages(options.stages, STAGES)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        is_finished = train(run, recipe=recipe, stages=stages, minutes=options.minutes)
        if is_finished and options.export is not None:
            export(run, options.export, recipe)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if not is_finished:
        return f"stopped; the same command goes on from the checkpoint in {run}"
    if options.export is None:
        return f"finished: {run}"
    return f'finished: {command()} generate "a red circle" --model {options.export.absolute()}'


def steer(name: str, out: Path | None, *, wait: bool) -> str:
    """Make a run wait, or let it go on; return what was done.

    Raises:
        ConfigError: there is no such model, or no run in the folder.
    """
    run = run_folder(name, out)
    if not run.is_dir():
        raise ConfigError(f"there is no run in {run}; give its folder with --out")
    pause = run / _PAUSE
    if wait:
        pause.touch()
        return f"the run in {run} waits from its next step on; --resume-run lets it go on"
    pause.unlink(missing_ok=True)
    return f"the run in {run} goes on"


def publish_model(name: str, run: Path | None) -> None:
    """Write a run's weights and cards into the package, and print the measured shares.

    Raises:
        ConfigError: there is no such model, or no finished run in the folder.
    """
    from ray_cluster.reference_models.evaluate import print_evaluation
    from ray_cluster.reference_models.publish import publish

    folder = run_folder(name, run)
    if not folder.is_dir():
        raise ConfigError(f"there is no run in {folder}; give its folder with --run")
    try:
        print_evaluation(publish(folder))
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def evaluate_model(name: str, options: Mapping[str, Any], report: Path | None) -> None:
    """Measure a built-in model or a folder, and print the shares.

    Raises:
        ConfigError: there is no such model.
    """
    from ray_cluster.reference_models.evaluate import (
        EvaluationOptions,
        evaluate,
        print_evaluation,
    )

    folder = builtin_folder(name) or Path(name).expanduser()
    if not (folder / "model_index.json").is_file():
        raise ConfigError(
            f"{name!r} is neither a built-in model ({', '.join(BUILTIN_MODELS)}) nor a diffusers "
            "folder"
        )
    print_evaluation(evaluate(folder, options=EvaluationOptions(**options), report=report))
    if report is not None:
        stdout().print(f"written to {report}", markup=False)


def run_folder(name: str, out: Path | None) -> Path:
    """Return the working folder of a run; ConfigError if the model is not built in."""
    if name not in BUILTIN_MODELS:
        raise ConfigError(
            f"{name!r} cannot be trained here; built-in models: {', '.join(BUILTIN_MODELS)}"
        )
    return out if out is not None else Path(".runs") / name


def _stages(given: tuple[str, ...], known: tuple[StageName, ...]) -> tuple[StageName, ...]:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"there is no stage {', '.join(unknown)}; the stages are {', '.join(known)}"
        )
    return tuple(stage for stage in known if stage in given) or known
