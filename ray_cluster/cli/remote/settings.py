"""``ray-cluster settings``: the settings of a running service, and others for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ray_cluster.cli.service.running_cell import RunningCell

settings = typer.Typer(
    help="Show and change the settings of a running service.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Address = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="host:port of the service's Ray, as 'serve' prints it. Default: the Ray that runs on "
        "this machine.",
    ),
]


def _connected(address: str | None) -> AbstractContextManager[RunningCell]:
    from ray_cluster.config.sections.cell_wide import RayConfig
    from ray_cluster.deployments.serve.ray_environment import apply_ray_environment

    # before Ray is imported: it asks for its token unless the environment says otherwise
    apply_ray_environment(RayConfig())
    from ray_cluster.cli.service.running_cell import connected

    return connected(address)


@settings.command()
def show(address: _Address = None) -> None:
    """Print the settings in force, their version, and the version of each process.

    API keys are shown as the beginnings of their SHA-256 digests.

    [bold]Examples[/bold]

      ray-cluster settings show

      ray-cluster settings show --address 127.0.0.1:6379
    """
    from ray_cluster.cli.output import plain_errors, stdout

    with plain_errors():
        from ray_cluster.cli.remote.settings_run import settings_text

        with _connected(address) as cell:
            report = cell.report()
        stdout().print(settings_text(report), markup=False)


@settings.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The whole configuration, as YAML.")],
    address: _Address = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, help="Seconds within which every process must apply it and every pool run."
        ),
    ] = 600.0,
) -> None:
    """Apply a configuration file to a running service, without replacing a process.

    New pools are added; removed ones are taken down once their images are made. What needs a
    redeploy is an error, and nothing is changed. Exits with 1 unless all processes applied it and
    all pools of FILE run.

    [bold]Examples[/bold]

      ray-cluster settings apply my.yaml

      ray-cluster settings apply my.yaml --address 127.0.0.1:6379 --timeout 60
    """
    from ray_cluster.cli.output import plain_errors, stderr

    with plain_errors():
        from ray_cluster.cli.progress import StateScreen
        from ray_cluster.cli.remote.settings_run import apply_file, checked

        checked(file)
        console = stderr()
        with _connected(address) as cell, StateScreen(console) as screen:
            note = partial(console.print, markup=False)
            apply_file(cell, file, timeout_s=timeout, show=screen.show, note=note)
