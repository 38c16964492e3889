"""Sizes a cascade over a day, and shows what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ray_cluster.cli.output import print_table, stdout
from ray_cluster.cli.workers import Workers
from ray_cluster.errors import ConfigError
from ray_cluster.simulator import cascade_policies
from ray_cluster.simulator.cascade_experiment import CascadeExperiment, CascadeRow
from ray_cluster.simulator.cascade_sizing import (
    CascadeSizing,
    CascadeSizingTask,
    Tried,
    size_cascade,
)
from ray_cluster.simulator.control_choices import checked_choices, runs_of
from ray_cluster.simulator.control_course import ControlResult
from ray_cluster.simulator.task_files import validated

_BINDS = {
    "throughput": "throughput: fewer could not make so many light images even if they never idled",
    "deadlines": "deadlines: with fewer too many requests would be late",
    "quality": "quality: with fewer requests would be in time, but images worse",
}


def plan_cascade(
    content: Mapping[str, Any], path: Path, num_processes: int | None
) -> Mapping[str, Any]:
    """Size the cascade of a file, and return the figures.

    Raises:
        ConfigError: the file says what can't be done.
    """
    task = validated(CascadeSizingTask, content, path, "task")
    try:
        choices = checked_choices(
            task.with_gpus(task.most_gpus), cascade_policies.POLICIES, path.parent
        )
    except ValueError as error:
        raise ConfigError(f"the task {path}: {error}") from None
    with Workers(num_processes) as workers:

        def evaluate(experiment: CascadeExperiment) -> Sequence[ControlResult[CascadeRow]]:
            runs = runs_of(experiment, choices)
            parts = [partial(cascade_policies.run_part, experiment, run) for run in runs]
            return workers.run(parts, f"{experiment.num_gpus} GPUs")

        sizing = size_cascade(task, evaluate)
    _show(task, sizing)
    return {
        "simulated": True,
        "task": task.model_dump(mode="json"),
        "gpus": sizing.gpus,
        "least": sizing.least,
        "at_peak": dict(sizing.at_peak),
        "binds": sizing.binds,
        "tried": {
            str(gpus): {
                "violations": one.violations.as_figures(),
                "fid": one.fid.as_figures(),
            }
            for gpus, one in sorted(sizing.tried.items())
        },
    }


def _show(task: CascadeSizingTask, sizing: CascadeSizing) -> None:
    wanted = f"at most {task.most_violations:.1%} late"
    if task.most_fid is not None:
        wanted += f", FID at most {task.most_fid:g}"
    kinds = ", ".join(dict.fromkeys(kind for one in task.profiles for kind in one.kinds))
    title = (
        f"{task.name}: {task.low_per_s:g} to {task.high_per_s:g} requests a second within "
        f"{task.slo_s:g} s, {wanted}, policy {task.policies[0]} (simulated, {kinds} times)"
    )
    table = Table(title=title)
    for column in ("GPUs", "late, %", "FID", "at the peak", "what binds"):
        table.add_column(column)
    count = f"more than {task.most_gpus}"
    if sizing.gpus is not None:
        count = f"{sizing.gpus} (at least {sizing.least})"
    at_peak = ", ".join(f"{number} {pool}" for pool, number in sizing.at_peak)
    table.add_row(count, *_figures(sizing.shown), at_peak, _BINDS[sizing.binds])
    print_table(stdout(), table)
    tried = (
        f"{gpus}: {one.violations.as_points()} % late, FID {one.fid.value:.2f}"
        for gpus, one in sorted(sizing.tried.items())
    )
    stdout().print(f"GPUs and what they attain (simulated): {'; '.join(tried)}")


def _figures(shown: Tried | None) -> tuple[str, str]:
    return ("", "") if shown is None else (shown.violations.as_points(), f"{shown.fid.value:.2f}")
