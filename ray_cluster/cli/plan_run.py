"""Sizes a workload on every device of a task, and shows what was found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from ray_cluster.cli.output import print_table, stdout
from ray_cluster.cli.plan_cascade import plan_cascade
from ray_cluster.cli.workers import Workers
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_runs import CellRow, run_cell
from ray_cluster.simulator.sizing import Sizing, SizingTask, size_device
from ray_cluster.simulator.task_files import read_mapping, validated

_BINDS = {
    "latency": "latency: an image alone takes longer than its deadline allows",
    "throughput": "throughput: fewer could not make so many even in batches that are always full",
    "bursts": "bursts: most beyond full batches would go if requests came evenly",
    "batches": "batches: most beyond full batches is for batches that this policy does not fill",
}


def run_plan(path: Path, *, num_seeds: int | None, num_processes: int | None) -> None:
    """Size the task of a file.

    Raises:
        ConfigError: the file can't be used.
    """
    content = read_mapping(path, "task")
    if num_seeds is not None:
        content["num_seeds"] = num_seeds
    if content.get("kind") == "cascade":
        plan_cascade(content, path, num_processes)
        return
    task = validated(SizingTask, content, path, "task")
    with Workers(num_processes) as workers:

        def evaluate(experiment: CellExperiment) -> Sequence[CellRow]:
            runs = [partial(run_cell, experiment, run) for run in experiment.runs()]
            label = f"{experiment.replicas} x {experiment.profile}"
            return workers.run(runs, label)

        sizings = [size_device(task, device, evaluate) for device in task.devices]
    _show(task, sizings)


def _show(task: SizingTask, sizings: Sequence[Sizing]) -> None:
    is_one = all(size.slo_s is None and size.slo_times_alone is None for size in task.sizes)
    within = f"within {task.slo_s:g} s" if is_one else "in time"
    kinds = ", ".join(dict.fromkeys(kind for one in sizings for kind in one.kinds))
    title = (
        f"{task.name}: {task.rate_per_s:g} requests a second, {task.attainment:.1%} of them "
        f"{within}, policy {task.policy} (simulated, {kinds} times)"
    )
    table = Table(title=title)
    for column in (
        *("device", "replicas", "if requests came evenly", "in full batches"),
        *("per hour", "in time, %", "what binds"),
    ):
        table.add_column(column)
    for one in sizings:
        table.add_row(*_cells(one, task))
    print_table(stdout(), table)
    for one in sizings:
        if not one.tried:
            continue
        tried = ", ".join(f"{number}: {mean.as_points()} %" for number, mean in one.tried)
        stdout().print(f"{_label(one)}, replicas and what they attain (simulated): {tried}")


def _label(one: Sizing) -> str:
    return f"{one.device.profile}, batches of {one.device.max_batch}"


def _cells(one: Sizing, task: SizingTask) -> list[str]:
    price = one.device.price_per_hour
    more = f"more than {task.most_replicas}"
    is_possible = one.binds != "latency"
    # nothing was simulated where even full batches are too many
    evenly = "" if not one.tried else str(one.evenly or more)
    return [
        _label(one),
        str(one.replicas or more) if is_possible else "none",
        evenly,
        str(one.least) if is_possible else "",
        f"{one.replicas * price:.2f}" if one.replicas is not None and price else "",
        "" if one.attainment is None else one.attainment.as_points(),
        _BINDS[one.binds],
    ]
