"""``ray-cluster plan``: how many devices a workload needs, and what a controller does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import DEFAULT_URL, plain_errors
from ray_cluster.cli.remote.service_options import ApiKey, AsJson, Config, Url
from ray_cluster.cli.simulation.workers import MOST_PROCESSES

plan = typer.Typer(
    help="Replicas: how many a workload needs (simulated), and what the controller of a running "
    "service plans.",
    no_args_is_help=True,
)


@plan.command()
def size(
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

    Of ControlNets it computes which should be services, on how many replicas.

    [bold]Examples[/bold]

      ray-cluster plan size benchmarks/policies/plans/sdxl-or-sd3.yaml

      ray-cluster plan size benchmarks/policies/plans/cascade.yaml --out cascade.json

      ray-cluster plan size benchmarks/policies/plans/controlnets.yaml
    """
    with plain_errors():
        from ray_cluster.cli.simulation.sizing_run import run_sizing

        run_sizing(task, num_seeds=seeds, num_processes=processes, out=out)


@plan.command()
def show(
    as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None
) -> None:
    """Show what the controller plans now: a line for each pool, cascade and service.

    [bold]Examples[/bold]

      ray-cluster plan show

      ray-cluster plan show --json
    """
    from ray_cluster.cli.remote.jobs_run import service_at
    from ray_cluster.cli.simulation.plan_view import show_plan

    with plain_errors(), service_at(url, api_key, config) as service:
        show_plan(service.plan(), as_json=as_json)


@plan.command()
def history(
    limit: Annotated[int, typer.Option(min=1, help="How many rounds at most.")] = 20,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG file to draw replicas, demand and deferrals into, over time."),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """List the rounds that changed something, the newest first: a line each.

    [bold]Examples[/bold]

      ray-cluster plan history --limit 5

      ray-cluster plan history --limit 100 --plot plans.png
    """
    from ray_cluster.cli.remote.jobs_run import service_at
    from ray_cluster.cli.simulation.plan_plot import draw_history
    from ray_cluster.cli.simulation.plan_view import list_rounds

    with plain_errors(), service_at(url, api_key, config) as service:
        found = service.plan()
        list_rounds(found, limit, as_json=as_json)
        if plot is not None:
            draw_history(found, limit, plot)


@plan.command()
def explain(
    version: Annotated[
        int | None,
        typer.Argument(help="Version of a plan that 'history' lists. Default: the last round."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Say why a plan is as it is: the demand, what a replica makes, what binds, what it cost.

    [bold]Examples[/bold]

      ray-cluster plan explain

      ray-cluster plan explain 12
    """
    from ray_cluster.cli.remote.jobs_run import service_at
    from ray_cluster.cli.simulation.plan_view import explain_plan

    with plain_errors(), service_at(url, api_key, config) as service:
        explain_plan(service.plan(), version)


@plan.command()
def pause(url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None) -> None:
    """Pause the controller: it plans and changes nothing. The last plan stays in force."""
    from ray_cluster.cli.output import stdout
    from ray_cluster.cli.remote.jobs_run import service_at

    with plain_errors(), service_at(url, api_key, config) as service:
        service.pause_plan(is_paused=True)
        stdout().print("paused: 'plan resume' lets the controller act again")


@plan.command()
def resume(url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None) -> None:
    """Let the controller apply its plans again."""
    from ray_cluster.cli.output import stdout
    from ray_cluster.cli.remote.jobs_run import service_at

    with plain_errors(), service_at(url, api_key, config) as service:
        is_dry = service.pause_plan(is_paused=False).state == "dry_run"
        stdout().print("not paused; control.dry_run still holds" if is_dry else "resumed")
