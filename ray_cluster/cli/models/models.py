"""``ray-cluster models``: list, fetch and calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.models.calibrate import calibrate, calibrate_cascade
from ray_cluster.cli.output import fail, plain_errors, stdout
from ray_cluster.cli.remote.service_options import URL_VARIABLE

models = typer.Typer(help="List, fetch and calibrate models.")
models.command()(calibrate)
models.command()(calibrate_cascade)


@models.command("list")
def list_models(
    url: Annotated[
        str | None,
        typer.Option(envvar=URL_VARIABLE, help="Also list the models of a running service."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key for --url; RAY_CLUSTER_API_KEY is another way.")
    ] = None,
) -> None:
    """List the built-in models, and those that a service at --url has ready.

    [bold]Examples[/bold]

      ray-cluster models list

      ray-cluster models list --url http://127.0.0.1:8000
    """
    from ray_cluster.cli.models.model_list import print_builtin, print_served

    with plain_errors():
        if api_key is not None and url is None:
            fail("--api-key changes nothing without --url; leave it out")
        print_builtin(stdout())
        if url is not None:
            print_served(stdout(), url, api_key)


@models.command()
def fetch(path: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration.")]) -> None:
    """Download the models that a configuration names, so that no replica has to.

    They are kept where all programs keep models of the hub (HF_HOME); what is there stays.

    [bold]Example[/bold]

      ray-cluster models fetch my.yaml
    """
    from ray_cluster.cli.models.model_list import fetch_models

    with plain_errors():
        fetch_models(stdout(), path)
