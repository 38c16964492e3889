"""``ray-cluster serve``: the whole service from one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="Configuration file. Default: the built-in configs/local.yaml."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: http.host.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API. Default: http.port.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of Ray's dashboard. Default: ray.dashboard_port.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Replicas of the first pool. Default: its own.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")
    ] = False,
) -> None:
    """Start the service, print what runs where, and run until Ctrl-C, SIGTERM or SIGHUP.

    FILE is watched: changed settings (limits, API keys, batch sizes, ...) are applied at once.
    Options override it. Without FILE, a copy of the built-in configuration is written to
    .ray-cluster/local.yaml at every start, and watched.

    [bold]Examples[/bold]

      ray-cluster serve

      ray-cluster serve --port 8100 --dashboard-port 8266 --replicas 1

      ray-cluster serve my.yaml --host 0.0.0.0
    """
    from ray_cluster.cli.output import plain_errors
    from ray_cluster.cli.service.served_file import ServedFile, builtin_copy

    with plain_errors():
        served = ServedFile(
            builtin_copy() if config is None else config,
            {"http": {"host": host, "port": port}, "ray": {"dashboard_port": dashboard_port}},
            replicas,
        )
        wanted = served.load()
        from ray_cluster.cli.service.service_run import run_service

        run_service(wanted, served, quiet=quiet)
