"""``ray-cluster serve``: the whole service from one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ray_cluster.config.loading import ClusterConfig


def serve(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file; without it the built-in configs/local.yaml."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on instead of http.host.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API instead of http.port.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of Ray's dashboard instead of ray.dashboard_port.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Replicas of the first pool, instead of its own number.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Write warnings and errors only.")
    ] = False,
) -> None:
    """Start the service, say what runs where, and run until Ctrl-C or SIGTERM.

    [bold]Examples[/bold]

      ray-cluster serve

      ray-cluster serve --port 8100 --dashboard-port 8266 --replicas 1

      ray-cluster serve my.yaml --host 0.0.0.0
    """
    from ray_cluster.cli.output import plain_errors
    from ray_cluster.config.loading import load_config

    with plain_errors():
        changes: dict[str, dict[str, Any]] = {
            "http": {"host": host, "port": port},
            "ray": {"dashboard_port": dashboard_port},
        }
        wanted = with_options(load_config(config), changes, replicas)
        from ray_cluster.cli.service_run import run_service

        run_service(wanted, quiet=quiet)


def with_options(
    config: ClusterConfig, changes: dict[str, dict[str, Any]], replicas: int | None
) -> ClusterConfig:
    """Return the configuration with what the options say, validated like a file.

    Args:
        changes: new values by section and key; None leaves a value alone.
        replicas: for the first pool.
    """
    from ray_cluster.config.loading import load_config

    content = config.model_dump()
    for section, values in changes.items():
        content[section].update({key: value for key, value in values.items() if value is not None})
    if replicas is not None:
        content["pools"][0]["replicas"] = replicas
    return load_config(content)
