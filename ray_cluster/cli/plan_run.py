"""Sizes a workload on every device of a task, and shows what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ray_cluster.cli.output import print_table, stderr, stdout
from ray_cluster.cli.plan_cascade import plan_cascade
from ray_cluster.cli.workers import Workers
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_runs import CellRow, run_cell
from ray_cluster.simulator.sizing import Sizing, SizingTask, size_device
from ray_cluster.simulator.task_files import validated

_BINDS = {
    "latency": "latency: an image alone takes longer than its deadline allows",
    "throughput": "throughput: fewer could not make so many even in batches that are always full",
    "bursts": "bursts: most beyond full batches would go if requests came evenly",
    "batches": "batches: most beyond full batches is for batches that this policy does not fill",
    "peaks": "peaks: fewer would do if the trace were even and filled all batches",
}


def run_plan(
    path: Path, *, num_seeds: int | None, num_processes: int | None, out: Path | None = None
) -> None:
    """Size the task of a file.

    Args:
        path: of the task.
        num_seeds: instead of those that the file says.
        num_processes: as many as there are cores if None.
        out: where the figures are written as JSON, too.

    Raises:
        ConfigError: the file can't be used, or `out` can't be written.
    """
    content = read_mapping(path, "task")
    if num_seeds is not None:
        content["num_seeds"] = num_seeds
    if out is not None and not (out.parent.is_dir() and not out.is_dir()):
        raise ConfigError(f"--out {out}: a file in a folder that is there is needed")
    if content.get("kind") == "cascade":
        figures = plan_cascade(content, path, num_processes)
    else:
        figures = _plan_cell(validated(SizingTask, content, path, "task"), path, num_processes)
    if out is not None:
        try:
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out}: {error}") from None
        stderr().print(f"wrote {out}", markup=False)


def _plan_cell(task: SizingTask, path: Path, num_processes: int | None) -> Mapping[str, Any]:
    with Workers(num_processes) as workers:

        def evaluate(experiment: CellExperiment) -> Sequence[CellRow]:
            runs = [partial(run_cell, experiment, run, path.parent) for run in experiment.runs()]
            label = f"{experiment.replicas} x {experiment.profile}"
            return workers.run(runs, label)

        sizings = [size_device(task, device, evaluate, path.parent) for device in task.devices]
    _show(task, sizings)
    return {
        "simulated": True,
        "task": task.model_dump(mode="json"),
        "devices": [_figures(one) for one in sizings],
    }


def _show(task: SizingTask, sizings: Sequence[Sizing]) -> None:
    is_one = all(size.slo_s is None and size.slo_times_alone is None for size in task.sizes)
    # requests of a trace have deadlines of their own
    is_one = is_one and task.trace is None
    within = f"within {task.slo_s:g} s" if is_one else "in time"
    kinds = ", ".join(dict.fromkeys(kind for one in sizings for kind in one.kinds))
    load = f"{task.load:g} requests a second"
    if task.trace is not None:
        load = f"the requests of {task.trace} at speed {task.speed:g}"
    failures = "" if task.mtbf_s is None else f", replicas that fail every {task.mtbf_s:g} s"
    title = (
        f"{task.name}: {load}, {task.attainment:.1%} of them {within}{failures}, policy "
        f"{task.policy} (simulated, {kinds} times)"
    )
    table = Table(title=title)
    table.add_column("")
    for one in sizings:
        table.add_column(_label(one))
    for row in zip(_ROWS, *(_cells(one, task) for one in sizings), strict=True):
        if any(row[1:]):
            table.add_row(*row)
    print_table(stdout(), table)
    stdout().print(
        f"Enough is where the mean over the seeds reaches {task.attainment:.1%}; the interval, of "
        "95 %, may reach below.",
        markup=False,
    )
    for one in sizings:
        if not one.tried:
            continue
        tried = ", ".join(f"{number}: {mean.as_points()} %" for number, mean in one.tried)
        stdout().print(f"{_label(one)}, replicas and what they attain (simulated): {tried}")


def _label(one: Sizing) -> str:
    return f"{one.device.profile}, batches of {one.device.max_batch}"


_ROWS = (
    *("replicas", "if requests came evenly", "in full batches", "per hour", "in time, %"),
    "what binds",
)


def _cells(one: Sizing, task: SizingTask) -> list[str]:
    price = one.device.price_per_hour
    more = f"more than {task.most_replicas}"
    is_possible = one.binds != "latency"
    # nothing was simulated where even full batches are too many, and a trace is as it is
    is_known = bool(one.tried) and task.trace is None
    return [
        str(one.replicas or more) if is_possible else "none",
        str(one.evenly or more) if is_known else "",
        str(one.least) if is_possible else "",
        f"{one.replicas * price:.2f}" if one.replicas is not None and price else "",
        "" if one.attainment is None else one.attainment.as_points(),
        _BINDS[one.binds],
    ]


def _figures(one: Sizing) -> Mapping[str, Any]:
    price = one.device.price_per_hour
    return {
        "device": one.device.model_dump(mode="json"),
        "profile_kinds": list(one.kinds),
        "replicas": one.replicas,
        "replicas_if_even": one.evenly,
        "replicas_in_full_batches": one.least or None,
        "per_hour": one.replicas * price if one.replicas is not None and price else None,
        "attainment": None if one.attainment is None else one.attainment.as_figures(),
        "binds": one.binds,
        "tried": {str(number): mean.as_figures() for number, mean in one.tried},
    }
