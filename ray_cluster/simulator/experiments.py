"""Experiment files: which kinds there are, and how each is run and summed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from ray_cluster.errors import ConfigError
from ray_cluster.simulator import (
    autoscaling_policies,
    autoscaling_report,
    cascade_policies,
    cascade_report,
)
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment
from ray_cluster.simulator.cascade_experiment import CascadeExperiment
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_report import report_cells
from ray_cluster.simulator.cell_runs import CellRow, Setting, run_cell
from ray_cluster.simulator.control_choices import checked_choices, runs_of
from ray_cluster.simulator.control_course import Run
from ray_cluster.simulator.control_experiment import ControlPolicy, ControlRun, E
from ray_cluster.simulator.control_report import Form, report_control
from ray_cluster.simulator.reports import Report
from ray_cluster.simulator.sp_excerpt import excerpt_of, shown_unit
from ray_cluster.simulator.sp_experiment import run_unit
from ray_cluster.simulator.sp_file import SpFile, checked_units
from ray_cluster.simulator.sp_report import report_groups
from ray_cluster.simulator.task_files import read_mapping, validated


@dataclass(frozen=True)
class Job:
    """An experiment as independent parts, and what makes a report of their results.

    Attributes:
        parts: functions without arguments that other processes can be sent.
        sum_up: takes the results in the parts' order.
    """

    name: str
    parts: Sequence[Callable[[], Any]]
    sum_up: Callable[[Sequence[Any]], Report]


def load_experiment(path: Path, *, num_seeds: int | None = None) -> Job:
    """Read an experiment's file.

    Args:
        path: a YAML file.
        num_seeds: as many seeds instead of what the file says.

    Raises:
        ConfigError: it can't be read, or says something that is not allowed; the message names the
            key, what was given and what is allowed.
    """
    content = read_mapping(path, "experiment")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"the experiment {path}: kind: given {kind!r:.80}; allowed: {', '.join(_KINDS)}"
        )
    if num_seeds is not None:
        content["num_seeds"] = num_seeds
    model, build = _KINDS[kind]
    try:
        return build(validated(model, content, path, "experiment"), path.parent)
    except ValueError as error:
        raise ConfigError(f"the experiment {path}: {error}") from None


def _cells(experiment: CellExperiment, _folder: Path) -> Job:
    # says at once what is wrong with the profile or the gain
    Setting.of(experiment)
    return Job(
        experiment.name,
        [partial(run_cell, experiment, run) for run in experiment.runs()],
        lambda rows: report_cells(experiment, cast(Sequence[CellRow], rows)),
    )


def _groups(file: SpFile, folder: Path) -> Job:
    experiment = file.experiment()
    units = checked_units(experiment, file.read_choices(folder))

    def sum_up(results: Sequence[Any]) -> Report:
        *found, excerpt = results
        return report_groups(file, units, list(chain.from_iterable(found)), excerpt)

    parts: list[Callable[[], Any]] = [partial(run_unit, unit) for unit in units]
    return Job(file.name, [*parts, partial(excerpt_of, shown_unit(experiment, units))], sum_up)


def _controlled(
    policies: Sequence[ControlPolicy[E]],
    run_part: Callable[[E, ControlRun], Run[Any]],
    form: Form[E],
) -> Callable[[E, Path], Job]:
    """Return what makes jobs of experiments with a control loop."""

    def job_of(experiment: E, folder: Path) -> Job:
        choices = checked_choices(experiment, policies, folder)
        return Job(
            experiment.name,
            [partial(run_part, experiment, run) for run in runs_of(experiment, choices)],
            lambda runs: report_control(experiment, choices, runs, form),
        )

    return job_of


_KINDS: dict[str, tuple[Any, Callable[[Any, Path], Job]]] = {
    "cell": (CellExperiment, _cells),
    "sequence-parallel": (SpFile, _groups),
    "cascade": (
        CascadeExperiment,
        _controlled(cascade_policies.POLICIES, cascade_policies.run_part, cascade_report.FORM),
    ),
    "autoscaling": (
        AutoscalingExperiment,
        _controlled(
            autoscaling_policies.POLICIES,
            autoscaling_policies.run_part,
            autoscaling_report.FORM,
        ),
    ),
}
