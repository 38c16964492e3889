"""What the simulator expects of the service on the same traces, with the machine's own profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.serving.compare.traces import Trace
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.simulator.cell.cell import attainment
from ray_cluster.simulator.cell.experiment import CellExperiment
from ray_cluster.simulator.cell.runs import Setting, simulate_cell
from ray_cluster.simulator.experiment import validated
from ray_cluster.simulator.traces import write_trace


@dataclass(frozen=True, slots=True)
class Prediction:
    """One simulated run."""

    load: float
    trace: str
    attainment: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """A contender in the simulator: its policy there, and its replica's profile and batch."""

    policy: str
    profile: Path
    max_batch: int


def predict(
    folder: Path, traces: Sequence[Trace], loads: Sequence[float], simulated: Simulated
) -> list[Prediction]:
    """Simulate every trace at every load; all figures are simulated.

    The files stay in the folder ``simulated``: ``ray-cluster simulate`` takes them too.

    Args:
        folder: of the comparison.
        traces: at the pace of load 1.
    """
    files, found = folder / "simulated", []
    files.mkdir(exist_ok=True)
    for trace in traces:
        path = _write(files, trace, loads, simulated)
        content = read_mapping(path, "experiment")
        experiment = validated(CellExperiment, content, f"experiment {path}")
        setting = Setting.of(experiment, files)
        for run in experiment.runs():
            fates = simulate_cell(setting, run).fates
            found.append(Prediction(run.load, trace.name, attainment(fates)))
    return found


def _write(folder: Path, trace: Trace, loads: Sequence[float], simulated: Simulated) -> Path:
    write_trace(folder / f"{trace.name}.csv", trace.arrivals())
    name = f"{trace.name}-{simulated.profile.stem}"
    content = {
        "kind": "cell",
        "name": name,
        "what": f"The requests of {trace.name} on one replica of this machine.",
        "profile": str(simulated.profile.resolve()),
        "trace": f"{trace.name}.csv",
        "speeds": list(loads),
        "replicas": 1,
        "max_batch": simulated.max_batch,
        "policies": [simulated.policy],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path
