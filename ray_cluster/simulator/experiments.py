"""Experiment files: reads one of any kind."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.cell.experiment import CellExperiment
from ray_cluster.simulator.cell.report import prepare_cells
from ray_cluster.simulator.cell.runs import Setting
from ray_cluster.simulator.control.autoscaling import AutoscalingExperiment
from ray_cluster.simulator.control.report import prepare_control
from ray_cluster.simulator.experiment import Experiment, ExperimentTask, validated
from ray_cluster.simulator.groups.experiment import SpExperiment
from ray_cluster.simulator.groups.report import prepare_groups
from ray_cluster.simulator.workload import Arrival

# how the experiments of each kind are read and prepared
_KINDS: dict[str, tuple[type[Experiment], Callable[[Any, Path], ExperimentTask]]] = {
    "cell": (CellExperiment, prepare_cells),
    "sequence-parallel": (SpExperiment, prepare_groups),
    "cascade": (CascadeExperiment, prepare_control),
    "autoscaling": (AutoscalingExperiment, prepare_control),
}


def read_experiment(path: Path, **changes: Any) -> Experiment:
    """Read an experiment's file.

    Args:
        path: a YAML file.
        changes: keys with other values than the file has.

    Raises:
        ConfigError: it can't be read, or says something that is not allowed; the message names the
            key, what was given and what is allowed.
    """
    content = read_mapping(path, "experiment") | changes
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"the experiment {path}: kind: given {reprlib.repr(kind):.80}; allowed: "
            f"{', '.join(_KINDS)}"
        )
    return validated(_KINDS[kind][0], content, f"experiment {path}")


def load_experiment(path: Path, **changes: Any) -> ExperimentTask:
    """Read an experiment's file and prepare its simulations; see :func:`read_experiment`."""
    experiment = read_experiment(path, **changes)
    try:
        _, prepare = _KINDS[experiment.kind]
        return prepare(experiment, path.parent)
    except ValueError as error:
        raise ConfigError(f"the experiment {path}: {error}") from None


def first_workload(path: Path) -> Sequence[Arrival]:
    """Return the requests of an experiment's first load and seed, of the model of its profile.

    Raises:
        ConfigError: as :func:`read_experiment`, or the experiment is not of the kind ``cell``.
    """
    experiment = read_experiment(path)
    if not isinstance(experiment, CellExperiment):
        raise ConfigError(
            f"the experiment {path}: kind: given {experiment.kind}; only experiments of the kind "
            "cell can be written as traces"
        )
    try:
        setting = Setting.of(experiment, path.parent)
    except ValueError as error:
        raise ConfigError(f"the experiment {path}: {error}") from None
    model = setting.pools[0].profile.model
    return [replace(one, model=model) for one in setting.first_workload]
