"""``ray-cluster simulate``: compares policies on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import plain_errors
from ray_cluster.cli.simulation.workers import MOST_PROCESSES


def simulate(
    experiments: Annotated[
        list[Path], typer.Argument(help="Experiment files (YAML).", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for JSON, tables and plots.")
    ] = Path("simulated"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, instead of the files'.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_PROCESSES, help="By default one for each core."),
    ] = None,
    write_trace: Annotated[
        Path | None,
        typer.Option(
            help="Instead of simulating, write the requests of an experiment's first load and seed "
            "to this file (.csv or .jsonl)."
        ),
    ] = None,
) -> None:
    """Compare policies on a virtual clock.

    Uses the service's own dispatcher, admission, routing, groups and control loop. Devices are as
    fast as a latency profile says. Every figure is simulated, and marked so.

    [bold]Examples[/bold]

      ray-cluster simulate benchmarks/policies/mixed-sizes.yaml

      ray-cluster simulate benchmarks/policies/cascade.yaml benchmarks/policies/autoscaling.yaml

      ray-cluster simulate benchmarks/policies/*.yaml --seeds 3 --out /tmp/simulated

      ray-cluster simulate benchmarks/policies/day-of-images.yaml --write-trace day.csv
    """
    with plain_errors():
        from ray_cluster.cli.simulation.simulate_run import run_experiments, write_workload

        if write_trace is not None:
            write_workload(experiments, write_trace)
            return
        run_experiments(experiments, out, num_seeds=seeds, num_processes=processes)
