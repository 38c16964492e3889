"""``python -m recipes``: trains, publishes and measures the bundled models.

A run's folder steers it: a file PAUSE in it makes it wait, FINISH begins the final decay. Ctrl-C
writes a checkpoint; the same command goes on from it.
"""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_folder, builtin_kinds, weights_folder
from recipes import export, publish, stages
from recipes.runs import is_run, open_run

logger = logging.getLogger(__name__)

_FIRST_MODEL = "shapes-sd"
# options of an evaluation, and the fields that they set
_MEASURED = {
    "prompts": "prompts",
    "other_prompts": "prompts_elsewhere",
    "bare_prompts": "prompts_bare",
    "repeats": "repeats",
    "seed": "seed",
    "steps": "steps",
    "guidance": "guidance",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; SystemExit with a sentence if it cannot be done."""
    parser = ArgumentParser(prog="python -m recipes", description=__doc__)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="train a model, or go on with a run")
    train.add_argument("name", choices=stages.MODEL_STAGES)
    train.add_argument("--out", type=Path, help="working folder; .runs/NAME by default")
    train.add_argument("--minutes", type=float, help="begin each stage's final decay after these")
    train.add_argument("--seed", type=int, help="of a new run; the recipe's by default")
    train.add_argument("--stage", action="append", help="only this one; repeatable")
    train.add_argument("--base", type=Path, help="finished model, for parts not trained here")
    train.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    train.add_argument("--export", type=Path, help="folder to write in diffusers' layout")
    train.set_defaults(run=_train)
    put = commands.add_parser("publish", help="put a finished run in a bundled model's place")
    put.add_argument("name", choices=stages.MODEL_STAGES)
    put.add_argument("--run", dest="out", type=Path, help="folder of the run; .runs/NAME")
    put.add_argument("--out", dest="target", type=Path, help="folder to write; the package's own")
    put.set_defaults(run=_publish)
    measure = commands.add_parser("evaluate", help="measure how often prompts are followed")
    measure.add_argument("name", help="a bundled model or part, or a diffusers folder")
    for one in _MEASURED:
        measure.add_argument(f"--{one.replace('_', '-')}", type=float if one == "guidance" else int)
    measure.add_argument("--out", type=Path, help="folder for evaluation.json and a contact sheet")
    measure.set_defaults(run=_evaluate)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        given.run(given)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


def _train(given: Namespace) -> None:
    folder = given.out or Path(".runs") / given.name
    known = {one.name: one for one in stages.MODEL_STAGES[given.name]}
    if unknown := sorted({*(given.stage or ())} - known.keys()):
        raise ConfigError(f"there is no stage {unknown}; the stages are {', '.join(known)}")
    base = given.base
    # all models but the first build on it; a run that goes on has its base already
    if base is None and given.name != _FIRST_MODEL and not is_run(folder):
        base = builtin_folder(_FIRST_MODEL)
    try:
        device = torch.zeros(1, device=given.device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {given.device}: {str(error).splitlines()[0]}") from None
    run = open_run(folder, seed=given.seed, base=base, device=device)
    chosen = [one for name, one in known.items() if not given.stage or name in given.stage]
    if not stages.train(run, chosen, minutes=given.minutes):
        logger.info("stopped; the same command goes on from the checkpoint in %s", folder)
        return
    if given.export is not None:
        export.export(given.name, run, given.export)
    logger.info("finished: %s", given.export or folder)


def _publish(given: Namespace) -> None:
    folder = given.out or Path(".runs") / given.name
    if not is_run(folder):
        raise ConfigError(f"there is no run in {folder}; give its folder with --run")
    publish.publish(given.name, open_run(folder), given.target).show()


def _evaluate(given: Namespace) -> None:
    folder = weights_folder() / given.name
    if given.name not in builtin_kinds():
        folder = Path(given.name).expanduser()
        if not (folder / "model_index.json").is_file():
            raise ConfigError(f"{given.name!r} is neither built in nor a diffusers folder")
    changes = {_MEASURED[k]: v for k, v in vars(given).items() if k in _MEASURED and v is not None}
    if not 1 <= changes.get("steps", 1) <= 1000:
        raise ConfigError(f"--steps {given.steps}: must be from 1 to 1000")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    publish.measure(given.name, folder, changes=changes, report=given.out).show()


if __name__ == "__main__":
    main()
