"""Where images go: names, formats, and never over what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_cluster.errors import ConfigError, InvalidRequest
from ray_cluster.requests import ImageFormat

_FORMAT_BY_SUFFIX: dict[str, ImageFormat] = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".webp": "webp",
}


def format_of(path: Path, given: ImageFormat | None) -> ImageFormat | None:
    """Return the format that a file's name and the option ask for; None if neither does.

    Raises:
        InvalidRequest: they contradict each other, or no image has such a name.
    """
    suffix = path.suffix.lower()
    if not suffix:
        return given
    meant = _FORMAT_BY_SUFFIX.get(suffix)
    if meant is None:
        raise InvalidRequest(
            f"The output {path} ends in {suffix!r}; allowed: {', '.join(_FORMAT_BY_SUFFIX)}.",
            "output",
        )
    if given is not None and given != meant:
        raise InvalidRequest(
            f"The output {path} is named as {meant}, but the format is {given}; "
            "change one of them.",
            "output_format",
        )
    return meant


def output_paths(path: Path, image_format: ImageFormat, num_images: int) -> list[Path]:
    """Return one path per image: the given one, or with -1, -2, ... before the suffix."""
    if not path.suffix:
        path = path.with_name(f"{path.name}.{image_format}")
    if num_images == 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{index}") for index in range(1, num_images + 1)]


def check_writable(paths: Sequence[Path], *, force: bool) -> None:
    """Raise :class:`ConfigError` if a file cannot be written, before any image is made."""
    for path in paths:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for {path.name}; make it first")
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; give a file name with --output")
        if path.exists() and not force:
            raise ConfigError(
                f"{path} exists already; choose another name with --output, "
                "or overwrite it with --force"
            )


def write_image(path: Path, data: bytes, *, force: bool) -> None:
    """Write one image; raises :class:`ConfigError` if that fails."""
    try:
        with path.open("wb" if force else "xb") as stream:
            stream.write(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
