"""What the commands of ``jobs`` do with their options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from ray_cluster.api.output.resource_schemas import JobResponse
from ray_cluster.cli.images.image_files import check_writable, format_of, output_paths
from ray_cluster.cli.output import complain, jobs_command, stderr, stdout
from ray_cluster.cli.remote.job_view import JobScreen, job_details, job_words, jobs_table
from ray_cluster.cli.remote.remote_jobs import check_completed, follow, images_of, open_job_ids
from ray_cluster.cli.remote.remote_service import RemoteService, do_each
from ray_cluster.config.loading import load_config
from ray_cluster.errors import ConfigError
from ray_cluster.protocol.jobs import JobState


def service_at(url: str, api_key: str | None, config: Path | None) -> RemoteService:
    """Return the service that the options mean."""
    return RemoteService.at(url, api_key, load_config(config))


def list_all(service: RemoteService, state: JobState | None, limit: int, *, as_json: bool) -> None:
    """Print the newest jobs: a line each, or as JSON."""
    found, console = service.jobs(state, limit), stdout()
    if as_json:
        typer.echo(json.dumps([job.model_dump() for job in found], indent=2))
    elif found:
        console.print(jobs_table(found, console), soft_wrap=False)
    else:
        stderr().print("no jobs" if state is None else f"no jobs that are {state}")


def show_one(service: RemoteService, job_id: str, *, as_json: bool) -> None:
    """Print all that is known of a job."""
    job = service.job(job_id)
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
        return
    for name, value in job_details(job).items():
        stdout().print(f"{name:<10} {value}", markup=False)


def watch_all(service: RemoteService, job_ids: Sequence[str]) -> None:
    """Show jobs until all have ended; leave with code 1 unless all are completed."""
    ids = list(dict.fromkeys(job_ids)) or open_job_ids(service)
    console = stdout()
    if not ids:
        stderr().print("no open jobs")
        return
    # what is written beside a live table goes through it
    notices = console if console.is_terminal else stderr()
    jobs: list[JobResponse] = []
    with JobScreen(console) as screen:
        for jobs in follow(service, ids, notices):
            screen.show(jobs)
    bad = [job for job in jobs if job.state != "completed"]
    for job in bad:
        complain(f"{job.id} {job_words(job)}")
    if bad:
        raise typer.Exit(1)


def cancel_all(service: RemoteService, job_ids: Sequence[str]) -> None:
    """End jobs; leave with code 1 if there is one that cannot be."""

    def cancel(job_id: str) -> str:
        job = service.cancel_job(job_id)
        was = "" if job.state == "cancelled" else " already; there is nothing to cancel"
        return f"{job.id}  {job.state}{was}"

    do_each(job_ids, cancel)


def fetch_images(service: RemoteService, job_id: str, output: Path, *, force: bool) -> None:
    """Write the images of a job that is completed."""
    named_as = format_of(output, None)
    job = service.job(job_id)
    if job.finished is None:
        raise ConfigError(
            f"{job.id} is not done: {job_words(job)}. "
            f"'{jobs_command('watch', job.id, service.base)}' waits for it"
        )
    check_completed(job)
    # all images of a job have one format
    image_format = format_of(Path(job.data[0].url), None)
    assert image_format is not None
    if named_as not in {None, image_format}:
        raise ConfigError(
            f"the output {output} is named as {named_as}, but the images of {job.id} are "
            f"{image_format}; name it so, or leave the suffix out"
        )
    paths = output_paths(output, image_format, job.n)
    check_writable(paths, force=force)
    images_of(job, lambda image: service.file(image.url)).save(paths, force=force)
