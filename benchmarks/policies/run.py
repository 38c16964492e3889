"""Runs all experiments of this folder, and writes one report.

``python -m benchmarks.policies.run`` takes some two hours of one core, with ``--seeds 2`` some
minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.machine import commit
from benchmarks.policies.report import read_results, write_report
from ray_cluster.cli.simulate_run import run_experiments
from ray_cluster.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results" / "policies"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parser().parse_args(arguments)
    paths = [path for path in sorted(FOLDER.glob("*.yaml")) if fnmatch(path.stem, options.only)]
    if not paths:
        sys.stderr.write(f"no experiment in {FOLDER} is called like {options.only}\n")
        return 1
    missing = [
        path
        for path in paths
        if not (options.go_on and (options.out / f"{path.stem}.json").exists())
    ]
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


def _head() -> str:
    now = datetime.now(tz=UTC)
    return f"Made on {now:%Y-%m-%d} by the code of {commit()[:12]}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.policies.run")
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'sp-*'")
    parser.add_argument("--seeds", type=int, help="as many instead of what each file says")
    parser.add_argument("--processes", type=int, help="as many as there are cores if absent")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for figures, plots, report")
    parser.add_argument("--go-on", action="store_true", help="leave out what OUT has already")
    return parser


if __name__ == "__main__":
    sys.exit(main())
