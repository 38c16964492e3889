"""Runs all experiments of this folder, and writes one report.

``python -m benchmarks.policies.run`` takes many hours of one core, most of them for the overloaded
cells of ``mixed-sizes*``, whose admission simulates every step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from benchmarks.machine import commit
from benchmarks.policies.report import read_results, write_report
from ray_cluster.cli.simulation.simulate_run import run_experiments
from ray_cluster.cli.simulation.workers import MOST_PROCESSES
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.experiments import read_experiment

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results" / "policies"
_MOST_SEEDS = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parser().parse_args(arguments)
    paths = [path for path in sorted(FOLDER.glob("*.yaml")) if fnmatch(path.stem, options.only)]
    if not paths:
        sys.stderr.write(f"no experiment in {FOLDER} is called like {options.only}\n")
        return 1
    every = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
    try:
        missing = [path for path in paths if not (options.go_on and _is_there(path, options))]
        for path in paths:
            if path not in missing:
                sys.stderr.write(f"{path.stem} has run already\n")
        # what can't be read is reported before hours of work, not after them
        read_results(options.out, [name for name in every if name not in _names(missing)])
        if missing:
            run_experiments(
                missing, options.out, num_seeds=options.seeds, num_processes=options.processes
            )
        # with what earlier runs have left there
        report = write_report(options.out, read_results(options.out, every), head=_head())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"wrote {report}\n")
    return 0


def _names(paths: Sequence[Path]) -> frozenset[str]:
    return frozenset(path.stem for path in paths)


def _is_there(path: Path, options: argparse.Namespace) -> bool:
    """Whether the figures are there of just this experiment, of as many seeds."""
    try:
        made = json.loads((options.out / f"{path.stem}.json").read_text(encoding="utf-8"))
        experiment: object = made["experiment"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    changes = {} if options.seeds is None else {"num_seeds": options.seeds}
    return experiment == read_experiment(path, **changes).model_dump(mode="json")


def _count(text: str, *, most: int) -> int:
    if not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"from 1 to {most:,}; given {text}")
    return int(text)


def _head() -> str:
    now = datetime.now(tz=UTC)
    return f"Made on {now:%Y-%m-%d} by the code of {commit()[:12]}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.policies.run")
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'sp-*'")
    parser.add_argument(
        "--seeds",
        type=partial(_count, most=_MOST_SEEDS),
        help="as many instead of what each file says",
    )
    parser.add_argument(
        "--processes",
        type=partial(_count, most=MOST_PROCESSES),
        help="as many as there are cores if absent",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="for figures, plots, report")
    parser.add_argument("--go-on", action="store_true", help="leave out what OUT has already")
    return parser


if __name__ == "__main__":
    sys.exit(main())
