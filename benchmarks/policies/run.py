"""Runs all experiments of this folder, and writes one report.

``python -m benchmarks.policies.run`` takes some two hours of one core, with ``--seeds 2`` some
minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.machine import commit
from benchmarks.policies.report import read_results, write_report
from ray_cluster.cli.simulate_run import run_experiments
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.task_files import read_mapping

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results" / "policies"
# of files that say none
_NUM_SEEDS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parser().parse_args(arguments)
    paths = [path for path in sorted(FOLDER.glob("*.yaml")) if fnmatch(path.stem, options.only)]
    if not paths:
        sys.stderr.write(f"no experiment in {FOLDER} is called like {options.only}\n")
        return 1
    missing = [path for path in paths if not (options.go_on and _is_there(path, options))]
    for path in paths:
        if path not in missing:
            sys.stderr.write(f"{path.stem} has run already\n")
    try:
        if missing:
            run_experiments(
                missing, options.out, num_seeds=options.seeds, num_processes=options.processes
            )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    # with what earlier runs have left there
    results = read_results(options.out, [path.stem for path in sorted(FOLDER.glob("*.yaml"))])
    report = write_report(options.out, results, head=_head())
    sys.stderr.write(f"wrote {report}\n")
    return 0


def _is_there(path: Path, options: argparse.Namespace) -> bool:
    """Whether the figures of an experiment have been made, of as many seeds."""
    try:
        made = json.loads((options.out / f"{path.stem}.json").read_text(encoding="utf-8"))
        num_seeds: object = made["experiment"]["num_seeds"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    asked = options.seeds or read_mapping(path, "experiment").get("num_seeds", _NUM_SEEDS)
    return bool(num_seeds == asked)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least 1; given {text}")
    return int(text)


def _head() -> str:
    now = datetime.now(tz=UTC)
    return f"Made on {now:%Y-%m-%d} by the code of {commit()[:12]}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.policies.run")
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'sp-*'")
    parser.add_argument("--seeds", type=_positive, help="as many instead of what each file says")
    parser.add_argument("--processes", type=_positive, help="as many as there are cores if absent")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for figures, plots, report")
    parser.add_argument("--go-on", action="store_true", help="leave out what OUT has already")
    return parser


if __name__ == "__main__":
    sys.exit(main())
