"""``ray-cluster settings``: what a running service goes by, and other settings for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

settings = typer.Typer(
    help="Show and change the settings of a running service.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Address = Annotated[
    str | None,
    typer.Option(
        help="Of the service's Ray (host:port, as 'serve' says it); without it the one that runs "
        "on this machine."
    ),
]


@settings.command()
def show(address: _Address = None) -> None:
    """Write the settings in force, their version, and which processes go by it.

    API keys are shown as the beginnings of their SHA-256 digests.

    [bold]Examples[/bold]

      ray-cluster settings show

      ray-cluster settings show --address 127.0.0.1:6379
    """
    from ray_cluster.cli.output import plain_errors, stdout

    with plain_errors():
        from ray_cluster.cli.ray_start import connected_quietly
        from ray_cluster.cli.settings_show import shown

        with connected_quietly(address) as cell:
            report = cell.report()
        stdout().print(shown(report), markup=False)


@settings.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The whole configuration, as YAML.")],
    address: _Address = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds in which every process must go by it.")
    ] = 600.0,
) -> None:
    """Have a running service go by a file, without replacing a process.

    New pools are added, removed ones are taken down once their images are made. What would need a
    redeploy is named, and nothing is changed. Leaves with code 1 unless all processes go by it.

    [bold]Examples[/bold]

      ray-cluster settings apply my.yaml

      ray-cluster settings apply my.yaml --address 127.0.0.1:6379 --timeout 60
    """
    from ray_cluster.cli.output import plain_errors, stderr

    with plain_errors():
        from ray_cluster.cli.ray_start import connected_quietly
        from ray_cluster.cli.settings_apply import apply_file

        with connected_quietly(address) as cell:
            apply_file(cell, file, timeout_s=timeout, say=stderr().print)
