"""``ray-cluster profile``: measures how long a model's operations take here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import plain_errors


def profile(  # noqa: PLR0917 - one argument per option is how typer declares them
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Profile to write, a .yaml file.")
    ] = Path("profile.yaml"),
    model: Annotated[
        str | None, typer.Option(help="A built-in model, a diffusers folder or a hub id.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Default: the built-in configs/local.yaml."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(help="Pool to measure. Default: by --model, or the first."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Sizes, such as 512x512,1024x768; several are also measured in one step. "
            "Default: the model's default size and half of it."
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Numbers of images in a batch.")] = "1,2,4,8",
    repeats: Annotated[
        int, typer.Option(min=2, max=900, help="Measurements of each operation.")
    ] = 10,
) -> None:
    """Measure how long encoding, steps and decoding of a model take on this machine.

    The profile tells the simulator and the planner how fast this device is. Run nothing else
    meanwhile.

    [bold]Examples[/bold]

      ray-cluster profile

      ray-cluster profile --sizes 64x64,96x96,128x128 --batches 1,4,8 -o here.yaml

      ray-cluster profile --config my.yaml --pool sdxl --sizes 1024x1024
    """
    with plain_errors():
        from ray_cluster.cli.images.call_check import choose_pool
        from ray_cluster.cli.models.profile_run import run_profile
        from ray_cluster.config.loading import load_config

        chosen = choose_pool(load_config(config), model, pool)
        run_profile(out, chosen, sizes=sizes, batches=batches, repeats=repeats)
