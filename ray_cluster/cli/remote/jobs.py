"""``ray-cluster jobs``: list, show, watch, cancel and fetch the durable jobs of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import DEFAULT_URL, plain_errors
from ray_cluster.cli.remote.service_options import AsJson, Config, Url
from ray_cluster.protocol.jobs import JobState

jobs = typer.Typer(
    help="The durable jobs of a running service: list, watch and cancel them, fetch their images."
)

_Id = Annotated[str, typer.Argument(help="The id of a job, as 'jobs list' shows it.")]
_ApiKey = Annotated[
    str | None,
    typer.Option(
        help="API key: only its client's jobs are visible. Default: that in RAY_CLUSTER_API_KEY, "
        "or the configuration's first plain one, for a service on this machine."
    ),
]


@jobs.command("list")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs at most.")] = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: _ApiKey = None,
    config: Config = None,
) -> None:
    """List your jobs, the newest first, a line each.

    [bold]Examples[/bold]

      ray-cluster jobs list

      ray-cluster jobs list --state failed --limit 100 --json
    """
    from ray_cluster.cli.remote.jobs_run import list_all, service_at

    with plain_errors(), service_at(url, api_key, config) as service:
        list_all(service, state, limit, as_json=as_json)


@jobs.command()
def show(
    job_id: _Id,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: _ApiKey = None,
    config: Config = None,
) -> None:
    """Show everything that is known about a job.

    [bold]Examples[/bold]

      ray-cluster jobs show job-0123456789abcdef0123456789abcdef
    """
    from ray_cluster.cli.remote.jobs_run import service_at, show_one

    with plain_errors(), service_at(url, api_key, config) as service:
        show_one(service, job_id, as_json=as_json)


@jobs.command()
def watch(
    job_ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of jobs. Default: all that have not ended.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: _ApiKey = None,
    config: Config = None,
) -> None:
    """Follow jobs until all of them have ended. Ctrl-C ends the watching, not the jobs.

    Exits with 1 when one of them failed or was cancelled.

    [bold]Examples[/bold]

      ray-cluster jobs watch

      ray-cluster jobs watch job-0123456789abcdef0123456789abcdef
    """
    from ray_cluster.cli.remote.jobs_run import service_at, watch_all

    with plain_errors(), service_at(url, api_key, config) as service:
        watch_all(service, job_ids or [])


@jobs.command()
def cancel(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs.")],
    url: Url = DEFAULT_URL,
    api_key: _ApiKey = None,
    config: Config = None,
) -> None:
    """Cancel jobs; those that have ended stay as they are.

    [bold]Examples[/bold]

      ray-cluster jobs cancel job-0123456789abcdef0123456789abcdef
    """
    from ray_cluster.cli.remote.jobs_run import cancel_all, service_at

    with plain_errors(), service_at(url, api_key, config) as service:
        cancel_all(service, job_ids)


@jobs.command()
def fetch(
    job_id: _Id,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write. Several images get -1, -2, ...")
    ] = Path("out"),
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")] = False,
    url: Url = DEFAULT_URL,
    api_key: _ApiKey = None,
    config: Config = None,
) -> None:
    """Write the images of a completed job to files.

    Without a suffix in --output, the files get that of the images' format.

    [bold]Examples[/bold]

      ray-cluster jobs fetch job-0123456789abcdef0123456789abcdef -o red.png
    """
    from ray_cluster.cli.remote.jobs_run import fetch_images, service_at

    with plain_errors(), service_at(url, api_key, config) as service:
        fetch_images(service, job_id, output, force=force)
