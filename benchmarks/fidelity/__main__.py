"""Measures reuse beside fewer steps: ``python -m benchmarks.fidelity --work FOLDER``.

May be stopped at any time and goes on where it was; ``--report FOLDER`` reports on what is there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

# before torch is imported: what is compared is one thread with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.fidelity import fewer_plan
from benchmarks.fidelity.choosing import choose
from benchmarks.fidelity.fewer_steps import Study
from benchmarks.fidelity.plan import (
    MODELS,
    FidelityRun,
    Grid,
    held_out_runs,
    quick_grid,
    tuning_runs,
)
from benchmarks.fidelity.work import Made, Workshop, load_made
from benchmarks.machine import describe_run
from benchmarks.progress import Reports, progress_bar, wide_console


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing, for as long as is allowed, and report on all of it."""
    options = _parse(arguments)
    until_s = time.monotonic() + options.minutes * 60
    options.work.mkdir(parents=True, exist_ok=True)
    if options.fewer_steps:
        _fewer_steps(options, until_s)
        return 0
    grid = quick_grid() if options.quick else Grid()
    if options.batches is not None:
        grid = replace(grid, num_held_out=options.batches)
    if options.steps is not None:
        controls = tuple(one for one in grid.control_steps if one < options.steps)
        steps = (options.steps,)
        grid = replace(grid, base_steps=steps, control_steps=controls + steps)
    if options.px is not None:
        grid = replace(grid, sizes_px=(options.px,))
    if options.model is not None:
        grid = replace(grid, models=(options.model,))
    started = datetime.now(UTC)
    tuning = list(tuning_runs(grid))
    make_missing(tuning, options.work, until_s)
    finalists = choose(grid, load_made(tuning, options.work))
    make_missing(list(held_out_runs(grid, finalists)), options.work, until_s)
    if options.report is not None:
        from benchmarks.fidelity.report import write_report

        header = describe_run("ray-cluster fidelity 1", quick=options.quick, started=started)
        write_report(grid, options.work, options.report, header)
    return 0


def _fewer_steps(options: argparse.Namespace, until_s: float) -> None:
    """Choose on the one half of the prompts, and only then make the other."""
    started, grids = datetime.now(UTC), fewer_plan.model_grids(quick=options.quick)
    for grid in grids:
        tuning = list(fewer_plan.tuning_runs(grid))
        make_missing(tuning, options.work, until_s)
        chosen = Study(grid, load_made(tuning, options.work)).chosen()
        make_missing(list(fewer_plan.held_out_runs(grid, chosen)), options.work, until_s)
    if options.report is not None:
        from benchmarks.fidelity.fewer_report import write_fewer_steps

        header = describe_run("ray-cluster fewer steps 1", quick=options.quick, started=started)
        write_fewer_steps(grids, options.work, options.report, header)


def make_missing(wanted: Sequence[FidelityRun], work: Path, until_s: float) -> None:
    """Make the runs that have no file yet, in their order, until the time is up."""
    missing = [run for run in wanted if not (work / f"{run.name}.npz").exists()]
    if not missing or time.monotonic() > until_s:
        return
    workshop = Workshop(max(run.px for run in wanted))
    total, done = sum(run.work for run in missing), 0
    with progress_bar(wide_console()) as progress:
        report = Reports(progress, {"runs": 1.0}).of("runs")
        for run in missing:
            if time.monotonic() > until_s:
                break
            report(done / total, run.name)
            made: Made = workshop.make(run)
            made.save(work / f"{run.name}.npz")
            done += run.work


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the finished runs")
    parser.add_argument("--report", type=Path, help="folder to write the report to")
    parser.add_argument(
        "--fewer-steps", action="store_true", help="how few steps will do, without any reuse"
    )
    parser.add_argument("--quick", action="store_true", help="a minute, to see that all works")
    parser.add_argument("--batches", type=int, help="of 8 prompts to report on")
    parser.add_argument("--steps", type=int, help="the one number of steps to compare variants at")
    parser.add_argument("--px", type=int, help="the one size of images")
    parser.add_argument("--model", choices=MODELS, help="the one model")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop making runs after so many")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
