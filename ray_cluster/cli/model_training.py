"""Trains and measures the built-in models."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_cluster.cli.commands import command
from ray_cluster.cli.output import stdout
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_MODELS, builtin_folder, builtin_kinds, weights_folder

if TYPE_CHECKING:
    import torch

    from ray_cluster.training.stages import Stage

_PAUSE = "PAUSE"
_FIRST_MODEL = "shapes-sd"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What ``models train`` was asked for.

    Attributes:
        out: the run's working folder; None takes the usual one.
        minutes: time after which each stage's final decay begins.
        stages: empty for all.
        base: a finished model's folder, for what the run has not trained itself.
        device: where to train, as torch names it.
        export: where to write a diffusers folder when all is done.
    """

    name: str
    out: Path | None
    minutes: float | None
    seed: int | None
    stages: tuple[str, ...]
    base: Path | None
    device: str
    export: Path | None


def train_model(options: TrainingOptions) -> str:
    """Train, or go on with, a run; return what to do next.

    Raises:
        ConfigError: there is no such model or stage, or a stage lacks the one before it.
    """
    from ray_cluster.training.export import export
    from ray_cluster.training.runs import is_run, open_run
    from ray_cluster.training.stages import MODEL_STAGES, train

    folder = run_folder(options.name, options.out)
    stages = _stages(options.stages, MODEL_STAGES[options.name])
    if options.export is not None and options.export.is_file():
        raise ConfigError(f"--export {options.export} is a file; give a folder")
    # a run that goes on has the base that it began with
    base = options.base or (None if is_run(folder) else _usual_base(options.name))
    run = open_run(folder, seed=options.seed, base=base, device=_device(options.device))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        is_finished = train(run, stages, minutes=options.minutes)
        if is_finished and options.export is not None:
            export(options.name, run, options.export)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if not is_finished:
        return f"stopped; the same command goes on from the checkpoint in {folder}"
    if options.export is None or options.name not in BUILTIN_MODELS:
        return f"finished: {options.export or folder}"
    model = shlex.quote(str(options.export.absolute()))
    return f'finished: {command()} generate "a red circle" --model {model}'


def steer(name: str, out: Path | None, *, wait: bool) -> str:
    """Make a run wait, or let it go on; return what was done.

    Raises:
        ConfigError: there is no such model, or no run in the folder.
    """
    from ray_cluster.training.runs import is_run

    run = run_folder(name, out)
    if not is_run(run):
        raise ConfigError(f"there is no run in {run}; give its folder with --out")
    pause = run / _PAUSE
    if wait:
        pause.touch()
        return f"training in {run} waits from its next step on; --resume-run lets it go on"
    pause.unlink(missing_ok=True)
    return f"training in {run} waits no more"


def publish_model(name: str, run: Path | None, target: Path | None) -> None:
    """Write a run's weights and cards into the package or a folder, and print what was measured.

    Raises:
        ConfigError: there is no such model, or no finished run in the folder.
    """
    from ray_cluster.training.publish import publish
    from ray_cluster.training.runs import is_run, open_run

    folder = run_folder(name, run)
    if not is_run(folder):
        raise ConfigError(f"there is no run in {folder}; give its folder with --run")
    try:
        publish(name, open_run(folder), target).show()
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def evaluate_model(name: str, options: Mapping[str, Any], report: Path | None) -> None:
    """Measure a built-in model or part, or a folder, and print the figures.

    Raises:
        ConfigError: there is no such model.
    """
    from ray_cluster.training.publish import measure

    folder = weights_folder() / name
    if name not in builtin_kinds():
        folder = Path(name).expanduser()
        if not (folder / "model_index.json").is_file():
            raise ConfigError(
                f"{name!r} is neither built in ({', '.join(builtin_kinds())}) nor a diffusers "
                "folder"
            )
    if report is not None:
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {report}: {error}") from None
    measure(name, folder, changes=options, report=report).show()
    if report is not None:
        stdout().print(f"written to {report}", markup=False)


def run_folder(name: str, out: Path | None) -> Path:
    """Return the working folder of a run; ConfigError if the model cannot be trained."""
    from ray_cluster.training.stages import MODEL_STAGES

    if name not in MODEL_STAGES:
        raise ConfigError(f"{name!r} cannot be trained here; what can: {', '.join(MODEL_STAGES)}")
    return out if out is not None else Path(".runs") / name


def _usual_base(name: str) -> Path | None:
    """All models but the first of the family build on it."""
    return None if name == _FIRST_MODEL else builtin_folder(_FIRST_MODEL)


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {error}; this machine always has cpu") from error
    return device


def _stages(given: tuple[str, ...], known: tuple[Stage, ...]) -> tuple[Stage, ...]:
    names = [stage.name for stage in known]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(
            f"there is no stage {', '.join(unknown)}; the stages are {', '.join(names)}"
        )
    return tuple(stage for stage in known if stage.name in given) or known
