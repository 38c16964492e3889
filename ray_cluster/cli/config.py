"""``ray-cluster config``: what a configuration comes to, and all keys that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def config(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="YAML file; without it the built-in configs/local.yaml."
        ),
    ] = None,
    with_reference: Annotated[
        bool, typer.Option("--reference", help="Write what every key means, as Markdown.")
    ] = False,
) -> None:
    """Check a configuration, and write it with all defaults filled in; nothing is started.

    Sizes and samplers are checked against models that are built in or in folders of this machine.
    API keys are not shown. Leaves with code 1 when something is wrong with it.

    [bold]Examples[/bold]

      ray-cluster config my.yaml

      ray-cluster config --reference
    """
    import yaml

    from ray_cluster.cli.output import plain_errors
    from ray_cluster.config.loading import load_config
    from ray_cluster.config.reference_docs import reference
    from ray_cluster.models.local import local_model

    if with_reference:
        typer.echo(reference(), nl=False)
        return
    with plain_errors():
        found = load_config(path)
        for pool in found.pools:
            local_model(pool)
        content = found.model_dump(mode="json")
    typer.echo(yaml.safe_dump(content, sort_keys=False), nl=False)
