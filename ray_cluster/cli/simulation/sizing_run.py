"""Sizes the task of a file, and shows what was found."""

from __future__ import annotations

import json
from pathlib import Path

from ray_cluster.cli.output import print_table, stderr, stdout
from ray_cluster.cli.simulation.simulate_run import rich_table
from ray_cluster.cli.simulation.workers import Workers
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.sizing import plan_task


def run_sizing(
    path: Path, *, num_seeds: int | None, num_processes: int | None, out: Path | None = None
) -> None:
    """Size the task of a file.

    Args:
        path: of the task.
        num_seeds: instead of the file's.
        num_processes: as many as there are cores if None.
        out: where the figures are written as JSON, too.

    Raises:
        ConfigError: the file can't be used, or `out` can't be written.
    """
    content = read_mapping(path, "task")
    if num_seeds is not None and content.get("kind") != "controlnets":
        content["num_seeds"] = num_seeds
    if out is not None and not (out.parent.is_dir() and not out.is_dir()):
        raise ConfigError(f"--out {out}: must be a file in an existing folder")
    with Workers(num_processes) as workers:
        plan = plan_task(content, path, workers.run)
    print_table(stdout(), rich_table(plan.table))
    for note in plan.notes:
        stdout().print(note, markup=False)
    if out is not None:
        try:
            out.write_text(json.dumps(plan.figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out}: {error}") from None
        stderr().print(f"wrote {out}", markup=False)
