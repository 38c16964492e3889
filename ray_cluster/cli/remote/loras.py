"""``ray-cluster loras``: list, register and remove the LoRAs of a service."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_cluster.cli.output import DEFAULT_URL, plain_errors
from ray_cluster.cli.remote.service_options import ApiKey, AsJson, Config, Url

loras = typer.Typer(help="The LoRAs of a running service: list, register and remove them.")


@loras.command("list")
def list_loras(
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many LoRAs at most. Default: all.")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """List LoRAs by name, a line each: state, base, size, ranks, uses, nodes.

    [bold]Examples[/bold]

      ray-cluster loras list

      ray-cluster loras list --limit 100 --json
    """
    from ray_cluster.cli.remote.jobs_run import service_at
    from ray_cluster.cli.remote.loras_run import list_all

    with plain_errors(), service_at(url, api_key, config) as service:
        list_all(service, limit, as_json=as_json)


@loras.command()
def add(  # noqa: PLR0917 - one argument per option is how typer declares them
    name: Annotated[str, typer.Argument(help="How calls choose it, such as 'pastel'.")],
    base: Annotated[str, typer.Option(help="Served name of the model that it is made for.")],
    source: Annotated[
        str,
        typer.Option(
            help="Where its file is: builtin:NAME, a path, a URL or hf:OWNER/NAME, as the "
            "service's loras.sources allow."
        ),
    ],
    sha256: Annotated[
        str | None, typer.Option(help="Digest of the file; another file is refused.")
    ] = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Fetch it at once, and keep it on each node.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Register a LoRA. Its file is fetched when a call first needs it.

    [bold]Examples[/bold]

      ray-cluster loras add pastel --base shapes-sd --source builtin:pastel

      ray-cluster loras add sketch --base shapes-sd --source /loras/sketch.safetensors --pinned
    """
    from ray_cluster.cli.remote.jobs_run import service_at
    from ray_cluster.cli.remote.loras_run import add_one

    body = {"name": name, "base": base, "source": source, "sha256": sha256, "pinned": pinned}
    with plain_errors(), service_at(url, api_key, config) as service:
        add_one(service, body)


@loras.command()
def remove(
    names: Annotated[list[str], typer.Argument(help="Names of LoRAs.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Remove LoRAs. Images accepted with them before are still made.

    [bold]Examples[/bold]

      ray-cluster loras remove pastel sketch
    """
    from ray_cluster.cli.remote.jobs_run import service_at
    from ray_cluster.cli.remote.loras_run import remove_all

    with plain_errors(), service_at(url, api_key, config) as service:
        remove_all(service, names)
