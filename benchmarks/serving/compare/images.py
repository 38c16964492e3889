"""Whether all contenders made the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ray_cluster.quality.distances import similarity

# of a pixel's value, in 1/255, in float32
MOST_DIFFERENCE = 1
# structural, in half precision: other batches round other products, and many steps add that up
LEAST_SIMILARITY = 0.98

_REFERENCES = ("one-by-one", "one-by-one/guarded")


@dataclass(frozen=True, slots=True)
class Likeness:
    """Images of one contender beside those of the reference.

    Attributes:
        reference: the contender that makes one image after the other.
        num_images: that both made.
        most: largest difference of a pixel's value, in 1/255; None without common images.
        least_similar: least structural similarity of an image; None without common images.
        dtype: what they were made in.
    """

    contender: str
    trace: str
    reference: str
    num_images: int
    most: int | None
    least_similar: float | None
    dtype: str

    @property
    def is_equal(self) -> bool:
        """Whether there were images, and all as good as equal for their dtype."""
        if self.most is None or self.least_similar is None:
            return False
        if self.dtype == "float32":
            return self.most <= MOST_DIFFERENCE
        return self.least_similar >= LEAST_SIMILARITY


def compare_images(folder: Path, contenders: Sequence[str], dtype: str) -> list[Likeness]:
    """Compare the images that were kept of busy runs with those made one after the other.

    Args:
        folder: ``images`` of a comparison: ``TRACE/CONTENDER/INDEX.png``.
        contenders: whose; the reference is that of them which makes one image after the other,
            if possible without a guard. Without one there is nothing to compare with.
        dtype: what they were made in.
    """
    reference = next((name for name in _REFERENCES if name in contenders), None)
    if reference is None:
        return []
    traces = sorted(path for path in folder.glob("*") if path.is_dir())
    return [
        _likeness(name, reference, trace, dtype)
        for trace in traces
        for name in contenders
        if name != reference and _folder(trace, name).is_dir()
    ]


def _folder(trace: Path, contender: str) -> Path:
    return trace / contender.replace("/", "-")


def _likeness(contender: str, reference: str, trace: Path, dtype: str) -> Likeness:
    own, other = _folder(trace, contender), _folder(trace, reference)
    pairs = [(path, other / path.name) for path in sorted(own.glob("*.png"))]
    found = [_distances(_pixels(a), _pixels(b)) for a, b in pairs if b.exists()]
    most = max((difference for difference, _ in found), default=None)
    least = min((likeness for _, likeness in found), default=None)
    return Likeness(contender, trace.name, reference, len(found), most, least, dtype)


def _pixels(path: Path) -> torch.Tensor:
    """[3, H, W], 0 to 255."""
    values = np.asarray(Image.open(path).convert("RGB")).astype(np.float32)
    return torch.from_numpy(values).permute(2, 0, 1)


def _distances(first: torch.Tensor, second: torch.Tensor) -> tuple[int, float]:
    """Largest difference of a value, and structural similarity."""
    if first.shape != second.shape:
        return 255, 0.0
    likeness = similarity(first[None] / 255, second[None] / 255)
    return int((first - second).abs().max()), float(likeness)
