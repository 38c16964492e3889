"""``ray-cluster observe``: what Grafana and Prometheus are to be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import plain_errors

observe = typer.Typer(help="A dashboard for Grafana, and alert rules for Prometheus.")

_Out = Annotated[Path | None, typer.Option("--out", "-o", help="File. Default: standard output.")]


@observe.command()
def dashboard(out: _Out = None) -> None:
    """Write the dashboard as JSON, which Grafana imports (Dashboards, New, Import).

    [bold]Example[/bold]

      ray-cluster observe dashboard -o ray-cluster.json
    """
    with plain_errors():
        from ray_cluster.observability.dashboards.grafana import dashboard as made

        _write(json.dumps(made(), indent=2) + "\n", out)


@observe.command()
def alerts(out: _Out = None) -> None:
    """Write the alert rules as YAML, a file for `rule_files` of Prometheus' configuration.

    [bold]Example[/bold]

      ray-cluster observe alerts -o ray-cluster-alerts.yaml
    """
    with plain_errors():
        import yaml

        from ray_cluster.observability.dashboards.alerts import alert_rules

        _write(yaml.safe_dump(alert_rules(), sort_keys=False, width=100), out)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
