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
    "bursts": "bursts: one less would do if requests came evenly",
    "batches": "batches: one less would not do even if requests came evenly, for under this policy "
    "batches are not always full",
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
    title = (
        f"{task.name}: {task.rate_per_s:g} requests a second, {task.attainment:.1%} of them within "
        f"{task.slo_s:g} s, policy {task.policy} (simulated)"
    )
    table = Table(title=title)
    for column in ("device", "times", "replicas", "per hour", "in time, %", "what binds"):
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
    count = "none"
    if one.replicas is not None:
        count = f"{one.replicas} (at least {one.least})"
    elif one.least:
        count = f"more than {task.most_replicas} (at least {one.least})"
    return [
        _label(one),
        ", ".join(one.kinds),
        count,
        f"{one.replicas * price:.2f}" if one.replicas is not None and price else "",
        "" if one.attainment is None else one.attainment.as_points(),
        _BINDS[one.binds],
    ]
