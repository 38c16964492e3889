"""``ray-cluster config``: checks a configuration, and prints it or the reference of all keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_cluster.errors import ConfigError, has_password, without_password
from ray_cluster.models.builtin import builtin_folder

if TYPE_CHECKING:
    from ray_cluster.config.loading import ClusterConfig

_PLACES = ("jobs", "results", "states", "inputs")


def config(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="Configuration file. Default: the built-in configs/local.yaml."
        ),
    ] = None,
    with_reference: Annotated[
        bool, typer.Option("--reference", help="Print what every key means, as Markdown.")
    ] = False,
    serve_deploy: Annotated[
        bool,
        typer.Option(
            "--serve-deploy", help="Print the file for 'serve deploy' and KubeRay instead."
        ),
    ] = False,
    settings_path: Annotated[
        Path | None,
        typer.Option(help="With --serve-deploy: path at which the dispatcher watches FILE."),
    ] = None,
) -> None:
    """Check a configuration, and print it with all defaults; nothing is started.

    Sizes, samplers and files are checked for built-in models and for folders on this machine;
    'doctor' also compares the weights with what the model needs. API keys, and users, passwords
    and queries of storage's URLs are not shown. Exits with 1 when the configuration is wrong.

    [bold]Examples[/bold]

      ray-cluster config my.yaml

      ray-cluster config --reference

      ray-cluster config my.yaml --serve-deploy --settings-path /etc/ray-cluster/my.yaml
    """
    import yaml

    from ray_cluster.cli.output import plain_errors, warn
    from ray_cluster.config.loading import load_config
    from ray_cluster.config.reference_docs import reference
    from ray_cluster.engine.files.folders import check_local_files
    from ray_cluster.models.local import check_models

    if with_reference:
        typer.echo(reference(), nl=False)
        return
    with plain_errors():
        found = load_config(path)
        check_models(found)
        check_local_files(found)
        if serve_deploy:
            content = _serve_deploy(found, path, settings_path)
            for message in _of_this_machine(found, settings_path):
                warn(message)
        else:
            content = found.model_dump(mode="json")
            content["storage"] |= {
                one: without_password(content["storage"][one]) for one in _PLACES
            }
    typer.echo(yaml.safe_dump(content, sort_keys=False), nl=False)


def _of_this_machine(config: ClusterConfig, settings_path: Path | None) -> Iterator[str]:
    """Yield what a deployment elsewhere would miss: paths and addresses of this machine."""
    if config.http.is_loopback:
        yield (
            f"http.host is {config.http.host}: only a node itself reaches its port; set 0.0.0.0, "
            "and http.api_keys"
        )
    storage = config.storage
    places = {name: getattr(storage, name) for name in _PLACES}
    if storage.jobs_file is not None:
        del places["jobs"]
    local = {
        name: place
        for name, place in places.items()
        if place.startswith(("/", "sqlite:///", "file:"))
    }
    if local and not storage.is_shared:
        named = ", ".join(f"{name} ({place})" for name, place in local.items())
        yield (
            f"paths of one machine in storage: {named}; set postgresql:// for jobs and an object "
            "store's URL for the others, or mount folders everywhere and set is_shared: true"
        )
    for pool in config.pools:
        given = filter(None, (pool.model, pool.transformer))
        for one in (one for one in given if builtin_folder(one) is None):
            if (path := Path(one).expanduser()).exists():
                kind, instead = ("folder", ", or give a hub id") if path.is_dir() else ("file", "")
                yield (
                    f"pool {pool.name}: {one} is a {kind} of this machine; mount it at an absolute "
                    f"path on every node{instead}"
                )
    if settings_path is None:
        yield "the dispatcher watches FILE at its path on this machine; give --settings-path"


def _serve_deploy(
    config: ClusterConfig, path: Path | None, settings_path: Path | None
) -> dict[str, Any]:
    """Return Serve's config file; it names this folder only if paths of storage are relative."""
    from ray_cluster.config.loading import load_config
    from ray_cluster.deployments.serve.deploy_file import serve_config

    if path is None:
        raise ConfigError("--serve-deploy needs FILE: the dispatcher watches it for settings")
    if secret := [one for one in _PLACES if has_password(getattr(config.storage, one))]:
        raise ConfigError(
            f"storage.{secret[0]} holds a password, which whoever reads Serve's file or Ray's "
            "dashboard would see: give the URL of a job store by storage.jobs_file (a mounted "
            "Secret), an object store's keys by its own environment variables"
        )
    elsewhere = load_config(path, folder=Path("/elsewhere"))
    folder = None if elsewhere.storage == config.storage else Path.cwd()
    return serve_config(config, settings_path or path, folder)
