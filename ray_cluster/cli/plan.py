"""``ray-cluster plan``: how many devices a workload needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import plain_errors
from ray_cluster.cli.workers import MOST_PROCESSES


def plan(
    task: Annotated[
        Path, typer.Argument(help="Workload, deadline and devices (YAML).", show_default=False)
    ],
    seeds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Number of seeds, instead of the file's.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_PROCESSES, help="By default one for each core."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the figures.", show_default=False)
    ] = None,
) -> None:
    """Find the fewest replicas that serve a workload in time, and what binds.

    For a cascade it finds the fewest GPUs that keep deadlines and quality over a day.

    It runs the service's dispatcher and policies on a virtual clock with more and more replicas, on
    devices as fast as their latency profiles say. Every figure is simulated, and marked so.

    [bold]Example[/bold]

      ray-cluster plan benchmarks/policies/plans/sdxl-or-sd3.yaml

      ray-cluster plan benchmarks/policies/plans/cascade.yaml --out cascade.json
    """
    with plain_errors():
        from ray_cluster.cli.plan_run import run_plan

        run_plan(task, num_seeds=seeds, num_processes=processes, out=out)
