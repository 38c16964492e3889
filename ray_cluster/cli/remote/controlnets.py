"""``ray-cluster controlnets``: what a service has to follow maps with."""

from __future__ import annotations

import typer

from ray_cluster.cli.output import DEFAULT_URL, plain_errors, stdout
from ray_cluster.cli.remote.service_options import ApiKey, AsJson, Config, Url

controlnets = typer.Typer(help="The ControlNets of a running service, and its detectors.")


# with one command alone, typer would take its name away
@controlnets.callback()
def _group() -> None:
    return


@controlnets.command("list")
def list_controlnets(
    as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None
) -> None:
    """List ControlNets, a line each: where they run and the models they are made for.

    The last line names the detectors, which make maps of images.

    [bold]Examples[/bold]

      ray-cluster controlnets list

      ray-cluster controlnets list --json
    """
    from ray_cluster.cli.remote.jobs_run import service_at

    with plain_errors(), service_at(url, api_key, config) as service:
        found, console = service.controlnets(), stdout()
        if as_json:
            typer.echo(found.model_dump_json(indent=2))
            return
        for one in found.data:
            bases = ", ".join(one.bases)
            told = f": {one.description}" if one.description else ""
            console.print(f"{one.name}  {one.mode}  for {bases}{told}", markup=False)
        console.print(f"detectors: {', '.join(found.detectors)}", markup=False)
