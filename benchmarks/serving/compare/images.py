"""Whether all contenders made the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

# of a pixel's value, in 1/255
MOST_DIFFERENCE = 1


@dataclass(frozen=True, slots=True)
class Likeness:
    """Images of one contender beside those of the reference.

    Attributes:
        num_images: that both made.
        most: largest difference of a pixel's value, in 1/255; None without common images.
    """

    contender: str
    trace: str
    num_images: int
    most: int | None

    @property
    def is_equal(self) -> bool:
        """Whether there were images, and all as good as equal."""
        return self.most is not None and self.most <= MOST_DIFFERENCE


def compare_images(folder: Path, contenders: Sequence[str], reference: str) -> list[Likeness]:
    """Compare the images that were kept of busy runs with a reference contender's.

    Args:
        folder: ``images`` of a comparison: ``TRACE/CONTENDER/INDEX.png``.
        contenders: whose.
        reference: with whose; it is left out.
    """
    traces = sorted(path for path in folder.glob("*") if path.is_dir())
    return [
        _likeness(name, own, _folder(trace, reference))
        for trace in traces
        for name in contenders
        if name != reference and (own := _folder(trace, name)).is_dir()
    ]


def _folder(trace: Path, contender: str) -> Path:
    return trace / contender.replace("/", "-")


def _likeness(contender: str, own: Path, reference: Path) -> Likeness:
    pairs = [(path, reference / path.name) for path in sorted(own.glob("*.png"))]
    differences = [_difference(a, b) for a, b in pairs if b.exists()]
    return Likeness(
        contender, own.parent.name, len(differences), max(differences) if differences else None
    )


def _difference(first: Path, second: Path) -> int:
    a, b = (np.asarray(Image.open(path).convert("RGB")).astype(int) for path in (first, second))
    if a.shape != b.shape:
        return 255
    return int(np.abs(a - b).max())
