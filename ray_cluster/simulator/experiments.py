"""Experiment files: which kinds there are, and how each is run and summed up."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError
from ray_cluster.simulator import (
    autoscaling_policies,
    autoscaling_report,
    cascade_policies,
    cascade_report,
)
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment
from ray_cluster.simulator.cascade_experiment import CascadeExperiment
from ray_cluster.simulator.cell_excerpt import excerpt_of, shown_runs
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_report import report_cells
from ray_cluster.simulator.cell_runs import Setting, run_cell
from ray_cluster.simulator.control_choices import checked_choices, runs_of
from ray_cluster.simulator.control_course import ControlResult
from ray_cluster.simulator.control_experiment import ControlPolicy, ControlRun, E
from ray_cluster.simulator.control_report import Form, report_control
from ray_cluster.simulator.reports import Report
from ray_cluster.simulator.sp_excerpt import excerpt_of as sp_excerpt_of
from ray_cluster.simulator.sp_excerpt import shown_unit
from ray_cluster.simulator.sp_experiment import run_unit
from ray_cluster.simulator.sp_file import SpFile, checked_units
from ray_cluster.simulator.sp_report import report_groups
from ray_cluster.simulator.task_files import validated
from ray_cluster.simulator.workload import Arrival


@dataclass(frozen=True)
class ExperimentTask:
    """An experiment as independent parts, and what makes a report of their results.

    Attributes:
        parts: functions without arguments that other processes can be sent.
        sum_up: takes the results in the parts' order.
    """

    name: str
    parts: Sequence[Callable[[], Any]]
    sum_up: Callable[[Sequence[Any]], Report]


def load_experiment(path: Path, *, num_seeds: int | None = None) -> ExperimentTask:
    """Read an experiment's file.

    Args:
        path: a YAML file.
        num_seeds: as many seeds instead of what the file says.

    Raises:
        ConfigError: it can't be read, or says something that is not allowed; the message names the
            key, what was given and what is allowed.
    """
    experiment, build = _checked(path, num_seeds)
    try:
        return build(experiment, path.parent)
    except ValueError as error:
        raise ConfigError(f"the experiment {path}: {error}") from None


def described(path: Path, *, num_seeds: int | None = None) -> dict[str, Any]:
    """Return an experiment as its figures describe it, for telling whether they are of it.

    Raises:
        ConfigError: as :func:`load_experiment`.
    """
    experiment, _ = _checked(path, num_seeds)
    return dict(experiment.model_dump(mode="json"))


def _checked(
    path: Path, num_seeds: int | None
) -> tuple[Any, Callable[[Any, Path], ExperimentTask]]:
    """An experiment as its file says it, and what makes a job of it."""
    content, kind = _read(path)
    if num_seeds is not None:
        content["num_seeds"] = num_seeds
    model, build = _KINDS[kind]
    return validated(model, content, path, "experiment"), build


def first_workload(path: Path) -> Sequence[Arrival]:
    """Return the requests of an experiment's first load and seed, of the model of its profile.

    Raises:
        ConfigError: as :func:`load_experiment`, or the experiment is of another kind than ``cell``.
    """
    content, kind = _read(path)
    if kind != "cell":
        raise ConfigError(f"the experiment {path}: kind: given {kind}; traces are written of: cell")
    experiment = validated(CellExperiment, content, path, "experiment")
    try:
        setting = Setting.of(experiment, path.parent)
    except ValueError as error:
        raise ConfigError(f"the experiment {path}: {error}") from None
    model = setting.pools[0].profile.model
    workload = setting.workload(experiment.loads[0], experiment.seeds[0])
    return [replace(one, model=model) for one in workload]


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """A file's keys and values, and its kind."""
    content = read_mapping(path, "experiment")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"the experiment {path}: kind: given {reprlib.repr(kind):.80}; allowed: "
            f"{', '.join(_KINDS)}"
        )
    return content, kind


def _cells(experiment: CellExperiment, folder: Path) -> ExperimentTask:
    # says at once what is wrong with the profile, the gain or the trace
    setting = Setting.of(experiment, folder)
    runs = list(experiment.runs())
    parts: list[Callable[[], Any]] = [partial(run_cell, experiment, run, folder) for run in runs]
    parts += [partial(excerpt_of, experiment, run, folder) for run in shown_runs(experiment)]

    def sum_up(results: Sequence[Any]) -> Report:
        return report_cells(setting, results[: len(runs)], results[len(runs) :])

    return ExperimentTask(experiment.name, parts, sum_up)


def _groups(file: SpFile, folder: Path) -> ExperimentTask:
    experiment = file.experiment()
    units = checked_units(experiment, file.read_choices(folder))

    def sum_up(results: Sequence[Any]) -> Report:
        *found, excerpt = results
        return report_groups(file, units, list(chain.from_iterable(found)), excerpt)

    parts: list[Callable[[], Any]] = [partial(run_unit, unit) for unit in units]
    return ExperimentTask(
        file.name, [*parts, partial(sp_excerpt_of, shown_unit(experiment, units))], sum_up
    )


def _controlled(
    policies: Sequence[ControlPolicy[E]],
    run_part: Callable[[E, ControlRun], ControlResult[Any]],
    form: Form[E],
) -> Callable[[E, Path], ExperimentTask]:
    """Return what makes jobs of experiments with a control loop."""

    def job_of(experiment: E, folder: Path) -> ExperimentTask:
        choices = checked_choices(experiment, policies, folder)
        return ExperimentTask(
            experiment.name,
            [partial(run_part, experiment, run) for run in runs_of(experiment, choices)],
            lambda runs: report_control(experiment, choices, runs, form),
        )

    return job_of


_KINDS: dict[str, tuple[Any, Callable[[Any, Path], ExperimentTask]]] = {
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
