"""What ``generate`` and ``fetch`` write: images, previews on the way, and a line about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.api.output.image_schemas import ImageFidelity
from ray_cluster.cli.output import stderr, stdout
from ray_cluster.errors import ConfigError, InvalidRequest, RayClusterError
from ray_cluster.requests import ImageFormat

_FORMAT_BY_SUFFIX: dict[str, ImageFormat] = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".webp": "webp",
}


class GenerateFailed(RayClusterError):
    """No image, for a reason that is not in the request's parameters."""


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """One encoded image.

    Attributes:
        timing: seconds by stage.
        effort: its fidelity and steps in words; empty for an exact one.
        stage: which of a cascade's models made it, and why; empty for another one's.
    """

    data: bytes
    seed: int
    timing: Mapping[str, float]
    effort: str = ""
    stage: str = ""


@dataclass(frozen=True, slots=True)
class GeneratedImages:
    """The images of one call.

    Attributes:
        size: WIDTHxHEIGHT.
        deadline_met: None where the call had no deadline.
        warnings: what was probably meant otherwise.
    """

    model: str
    size: str
    images: tuple[GeneratedFile, ...]
    elapsed_s: float
    deadline_met: bool | None
    warnings: tuple[str, ...] = ()

    def save(self, paths: Sequence[Path], *, force: bool) -> None:
        """Write one file per image; ConfigError if one cannot be written."""
        for path, image in zip(paths, self.images, strict=True):
            try:
                with path.open("wb" if force else "xb") as stream:
                    stream.write(image.data)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
            stages = ", ".join(
                f"{name.removesuffix('_s')} {seconds:.2f} s"
                for name, seconds in image.timing.items()
                if seconds >= 0.005
            )
            parts = (f"{path}", f"seed {image.seed}", self.size, image.effort, image.stage, stages)
            stdout().print("  ".join(part for part in parts if part), markup=False)
        summary = f"{len(self.images)} image(s) of {self.model} in {self.elapsed_s:.2f} s"
        if self.deadline_met is not None:
            summary += f", {'within' if self.deadline_met else 'AFTER'} the deadline"
        stdout().print(summary, markup=False)
        for warning in self.warnings:
            stderr().print(f"warning: {warning}", markup=False)


def effort_words(fidelity: ImageFidelity | None) -> str:
    """Return the fidelity that an image got, with its steps; empty for an exact one."""
    if fidelity is None or fidelity.got == "exact":
        return ""
    num_steps = fidelity.steps_computed + fidelity.steps_reused
    steps = f"{num_steps} of {fidelity.steps_asked} steps"
    if fidelity.steps_reused:
        steps += f", {fidelity.steps_reused} of them reused"
    return steps if fidelity.got is None else f"{fidelity.got}: {steps}"


def format_of(path: Path, given: ImageFormat | None) -> ImageFormat | None:
    """Return the format that a file's name and the option ask for; None if neither does.

    Raises:
        InvalidRequest: they contradict each other, or the suffix is no image format.
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


class PreviewFiles:
    """One preview file per image: each preview replaces the one before; removed at the end.

    Args:
        paths: of the images.
        force: whether existing files may be overwritten.

    Raises:
        ConfigError: a file is in the way.
    """

    def __init__(self, paths: Sequence[Path], *, force: bool) -> None:
        self._paths = [path.with_stem(f"{path.stem}-preview") for path in paths]
        self._step_by_image: dict[int, int] = {}
        check_writable(self._paths, force=force)

    def is_newer(self, image: int, step: int) -> bool:
        """Whether a preview after so many steps is later than the last one written."""
        return step > self._step_by_image.get(image, 0)

    def write(self, image: int, step: int, data: bytes) -> Path:
        """Write a preview at once, never in pieces; ConfigError if it cannot be written."""
        path = self._paths[image]
        self._step_by_image[image] = step
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return path

    def remove(self) -> None:
        """Remove what was written."""
        for image in self._step_by_image:
            self._paths[image].unlink(missing_ok=True)
