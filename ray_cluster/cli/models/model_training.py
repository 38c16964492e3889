"""Trains and measures the built-in models."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_cluster.cli.output import command, stdout
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_MODELS, builtin_folder, builtin_kinds, weights_folder

if TYPE_CHECKING:
    import torch

    from ray_cluster.training.stages import Stage

_PAUSE = "PAUSE"
_FIRST_MODEL = "shapes-sd"


def train_model(
    name: str,
    out: Path | None,
    *,
    minutes: float | None,
    seed: int | None,
    only: Collection[str],
    base: Path | None,
    device: str,
    export_to: Path | None,
) -> str:
    """Start or continue a training run; return what to do next.

    Args:
        out: the run's working folder; None for ``.runs/NAME``.
        minutes: time after which each stage's final decay begins.
        only: names of stages; empty for all.
        base: a finished model's folder, for what the run has not trained itself.
        device: where to train, as torch names it.
        export_to: where to write a diffusers folder at the end.

    Raises:
        ConfigError: there is no such model or stage, or a stage lacks the one before it.
    """
    from ray_cluster.training.export import export
    from ray_cluster.training.runs import is_run, open_run
    from ray_cluster.training.stages import MODEL_STAGES, train

    folder = _run_folder(name, out)
    stages = _stages(only, MODEL_STAGES[name])
    if export_to is not None and export_to.is_file():
        raise ConfigError(f"--export {export_to} is a file; give a folder")
    # all models but the first of the family build on it; a run that goes on has its base already
    if base is None and name != _FIRST_MODEL and not is_run(folder):
        base = builtin_folder(_FIRST_MODEL)
    run = open_run(folder, seed=seed, base=base, device=_device(device))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        is_finished = train(run, stages, minutes=minutes)
        if is_finished and export_to is not None:
            export(name, run, export_to)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if not is_finished:
        return f"stopped; the same command goes on from the checkpoint in {folder}"
    if export_to is None or name not in BUILTIN_MODELS:
        return f"finished: {export_to or folder}"
    model = shlex.quote(str(export_to.absolute()))
    return f'finished: {command()} generate "a red circle" --model {model}'


def pause_run(name: str, out: Path | None, *, wait: bool) -> str:
    """Pause a run or let it go on; return what was done. ConfigError if there is no such run."""
    run = _existing_run(name, out, "--out")
    pause = run / _PAUSE
    if wait:
        pause.touch()
        return f"training in {run} waits from its next step on; --resume-run lets it go on"
    pause.unlink(missing_ok=True)
    return f"training in {run} waits no more"


def publish_model(name: str, run: Path | None, target: Path | None) -> None:
    """Write a run's weights and cards into the package or a folder, and print the measurements.

    Raises:
        ConfigError: there is no such model, or no finished run in the folder.
    """
    from ray_cluster.training.publish import publish
    from ray_cluster.training.runs import open_run

    try:
        publish(name, open_run(_existing_run(name, run, "--run")), target).show()
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


def _run_folder(name: str, out: Path | None) -> Path:
    from ray_cluster.training.stages import MODEL_STAGES

    if name not in MODEL_STAGES:
        raise ConfigError(f"{name!r} cannot be trained here; what can: {', '.join(MODEL_STAGES)}")
    return out if out is not None else Path(".runs") / name


def _existing_run(name: str, given: Path | None, option: str) -> Path:
    from ray_cluster.training.runs import is_run

    folder = _run_folder(name, given)
    if not is_run(folder):
        raise ConfigError(f"there is no run in {folder}; give its folder with {option}")
    return folder


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {error}; this machine always has cpu") from error
    return device


def _stages(given: Collection[str], known: tuple[Stage, ...]) -> tuple[Stage, ...]:
    names = [stage.name for stage in known]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(
            f"there is no stage {', '.join(unknown)}; the stages are {', '.join(names)}"
        )
    return tuple(stage for stage in known if stage.name in given) or known
