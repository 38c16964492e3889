"""``ray-cluster profile``: measures how long a model's operations take here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import plain_errors


def profile(  # noqa: PLR0917 - one argument per option is how typer declares them
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The profile, a .yaml file; it is replaced.")
    ] = Path("profile.yaml"),
    model: Annotated[
        str | None, typer.Option(help="A built-in model, a diffusers folder or a hub id.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file; without it the built-in configs/local.yaml."),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="The pool to take; the first, or the model's, if absent.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Such as 512x512,1024x768; the model's default size and half of it if absent. "
            "Several are also measured together in one step."
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Images in a batch, of each size.")] = "1,2,4,8",
    repeats: Annotated[
        int, typer.Option(min=2, max=900, help="How often each operation is counted.")
    ] = 10,
) -> None:
    """Measure how long encoding, steps and decoding of a model take on this machine.

    The file tells the simulator and the planner how fast this device is. Leave the machine alone
    meanwhile.

    [bold]Examples[/bold]

      ray-cluster profile

      ray-cluster profile --sizes 64x64,96x96,128x128 --batches 1,4,8 -o here.yaml

      ray-cluster profile --config my.yaml --pool sdxl --sizes 1024x1024
    """
    with plain_errors():
        from ray_cluster.cli.profile_run import ProfileOptions, run_profile

        run_profile(ProfileOptions(out, model, config, pool, sizes, batches, repeats))
