"""Previews beside the files of the images they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_cluster.cli.image_files import check_writable
from ray_cluster.errors import ConfigError


class PreviewFiles:
    """One file per image: each preview takes the place of the one before; gone at the end.

    Args:
        paths: of the images.
        force: whether files that are there already may be overwritten.

    Raises:
        ConfigError: a file is in the way.
    """

    def __init__(self, paths: Sequence[Path], *, force: bool) -> None:
        self._paths = [path.with_stem(f"{path.stem}-preview") for path in paths]
        self._shown: dict[int, int] = {}
        check_writable(self._paths, force=force)

    def is_news(self, image: int, step: int) -> bool:
        """Whether a preview of an image that rests on so many steps is later than the last."""
        return step > self._shown.get(image, 0)

    def show(self, image: int, step: int, data: bytes) -> Path:
        """Write a preview and return where; whoever looks sees it whole.

        Raises:
            ConfigError: it cannot be written.
        """
        path = self._paths[image]
        self._shown[image] = step
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return path

    def remove(self) -> None:
        """Remove what was written."""
        for image in self._shown:
            self._paths[image].unlink(missing_ok=True)
