"""Puts the commands together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Annotated

import typer

from ray_cluster.cli.checks.doctor import doctor
from ray_cluster.cli.config import config
from ray_cluster.cli.images.generate import generate
from ray_cluster.cli.keys import keys
from ray_cluster.cli.models.models import models
from ray_cluster.cli.models.profile import profile
from ray_cluster.cli.observe import observe
from ray_cluster.cli.remote.controlnets import controlnets
from ray_cluster.cli.remote.jobs import jobs
from ray_cluster.cli.remote.loras import loras
from ray_cluster.cli.remote.settings import settings
from ray_cluster.cli.service.serve import serve
from ray_cluster.cli.simulation.plan import plan
from ray_cluster.cli.simulation.simulate import simulate

app = typer.Typer(
    help="Serve images from diffusion models, and make them from the command line.",
    epilog="Start here: [bold]ray-cluster doctor[/bold], then [bold]ray-cluster serve[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(generate)
app.add_typer(jobs, name="jobs")
app.add_typer(models, name="models")
app.add_typer(loras, name="loras")
app.add_typer(controlnets, name="controlnets")
app.command()(doctor)
app.command()(config)
app.add_typer(keys, name="keys")
app.add_typer(settings, name="settings")
app.command()(profile)
app.command()(simulate)
app.add_typer(plan, name="plan")
app.add_typer(observe, name="observe")


@app.command()
def version() -> None:
    """Print the version."""
    try:
        found = package_version("ray-cluster")
    except PackageNotFoundError:
        found = "(run from a folder that was not installed)"
    typer.echo(f"ray-cluster {found}")


def _print_version(is_given: bool) -> None:
    if is_given:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    # the option acts by itself
    return
