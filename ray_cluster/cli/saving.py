"""Writes finished images to files, and a line about each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_cluster.cli.image_files import write_image
from ray_cluster.cli.made import GeneratedFile, MadeImages
from ray_cluster.cli.output import stdout


def save(made: MadeImages, paths: Sequence[Path], *, force: bool) -> None:
    """Write one file per image; ConfigError if one cannot be written."""
    for path, image in zip(paths, made.images, strict=True):
        write_image(path, image.data, force=force)
        stdout().print(_line(path, image, made), markup=False)
    stdout().print(_summary(made), markup=False)


def _line(path: Path, image: GeneratedFile, made: MadeImages) -> str:
    stages = ", ".join(
        f"{name.removesuffix('_s')} {seconds:.2f} s"
        for name, seconds in image.timing.items()
        if seconds >= 0.005
    )
    parts = (f"{path}", f"seed {image.seed}", made.size, image.effort, stages)
    return "  ".join(part for part in parts if part)


def _summary(made: MadeImages) -> str:
    text = f"{len(made.images)} image(s) of {made.model} in {made.elapsed_s:.2f} s"
    if made.deadline_met is None:
        return text
    return f"{text}, {'within' if made.deadline_met else 'AFTER'} the deadline"
