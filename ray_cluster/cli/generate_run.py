"""What ``generate`` does with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_cluster.cli.call_body import call_body
from ray_cluster.cli.image_files import check_writable, format_of, output_paths
from ray_cluster.cli.made import MadeImages
from ray_cluster.cli.output import stderr
from ray_cluster.cli.preview_files import PreviewFiles
from ray_cluster.cli.saving import save
from ray_cluster.config.loading import load_config
from ray_cluster.errors import ConfigError
from ray_cluster.requests import ImageFormat

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Files:
    """Files to write and to read.

    Attributes:
        like: a png whose recipe is repeated.
    """

    output: Path
    image_format: ImageFormat | None
    like: Path | None
    force: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where the images are made: at a URL, or here, from a configuration's pool."""

    url: str | None
    api_key: str | None
    timeout_s: float | None
    config: Path | None
    pool: str | None

    def check(self) -> None:
        """Raise :class:`ConfigError` for an option that would change nothing."""
        if self.url is not None and self.pool is not None:
            raise ConfigError(
                "--pool changes nothing with --url: the service chooses; give --model instead"
            )
        for name, value in {"--api-key": self.api_key, "--timeout": self.timeout_s}.items():
            if self.url is None and value is not None:
                raise ConfigError(f"{name} changes nothing without --url; leave it out")


def run(options: Mapping[str, Any], files: Files, place: Place) -> None:
    """Make the images and write them.

    Args:
        options: parameters of the API by its names; None leaves one open.

    Raises:
        RayClusterError: a wrong option, a file that is in the way, or no image.
    """
    place.check()
    image_format = format_of(files.output, files.image_format)
    body = call_body({**options, "output_format": image_format}, files.like)
    # before any work; what is wrong with `n` itself is said by those who make the images
    num_images = body["n"] if isinstance(body.get("n"), int) and body["n"] > 0 else 1
    paths = output_paths(files.output, image_format or "png", num_images)
    check_writable(paths, force=files.force)
    previews = PreviewFiles(paths, force=files.force)
    try:
        made = _make(body, place, previews)
    finally:
        previews.remove()
    save(made, paths, force=files.force)


def _make(body: Mapping[str, Any], place: Place, previews: PreviewFiles) -> MadeImages:
    config = load_config(place.config)
    if place.url is None:
        from ray_cluster.cli.call_check import check_call

        call = check_call(body, config, place.pool)
        # torch and diffusers take seconds to import
        from ray_cluster.cli.local_images import generate_here

        return generate_here(call, config, previews, stderr())
    from ray_cluster.cli.remote_images import generate_there
    from ray_cluster.cli.remote_service import RemoteService

    timeout_s = _TIMEOUT_S if place.timeout_s is None else place.timeout_s
    with RemoteService.at(place.url, place.api_key, config, answer_s=timeout_s) as service:
        return generate_there(service, body, timeout_s, previews, stderr())
