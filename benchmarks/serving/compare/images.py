"""Whether all contenders made the same images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ray_cluster.quality.distances import similarity

# of a pixel's value, in 1/255, in float32
MOST_DIFFERENCE = 1
# structural, in half precision: other batches round other products, and many steps add that up
LEAST_SIMILARITY = 0.98
_REFERENCES = ("one-by-one", "one-by-one/guarded")


def images_folder(folder: Path, contender: str, trace: str) -> Path:
    """Return where a comparison stores a contender's images of a trace."""
    return folder / "images" / trace / contender.replace("/", "-")


def compare_images(folder: Path, contenders: Sequence[str], dtype: str) -> Iterator[dict[str, Any]]:
    """Compare the stored images of each contender with those that were made one after the other.

    Yields:
        A row for each contender and trace with images of both.
    """
    reference = next((name for name in _REFERENCES if name in contenders), None)
    if reference is None:
        return
    for trace in sorted(path.name for path in (folder / "images").glob("*") if path.is_dir()):
        expected = images_folder(folder, reference, trace)
        for name in contenders:
            own = images_folder(folder, name, trace)
            pairs = [(path, expected / path.name) for path in sorted(own.glob("*.png"))]
            found = [_distances(a, b) for a, b in pairs if b.exists()]
            if name == reference or not found:
                continue
            most, least = max(gap for gap, _ in found), min(ssim for _, ssim in found)
            is_float32 = dtype == "float32"
            yield {
                "contender": name,
                "trace": trace,
                "reference": reference,
                "num_images": len(found),
                "largest_difference_255": most,
                "least_ssim": least,
                "equal": most <= MOST_DIFFERENCE if is_float32 else least >= LEAST_SIMILARITY,
            }


def _distances(first: Path, second: Path) -> tuple[int, float]:
    """Return the largest difference of a pixel's value, and the structural similarity."""
    one, other = (_pixels(path) for path in (first, second))
    if one.shape != other.shape:
        return 255, 0.0
    ssim = similarity(one[None] / 255, other[None] / 255)
    return int((one - other).abs().max()), float(ssim)


def _pixels(path: Path) -> torch.Tensor:
    """[3, H, W], 0 to 255."""
    values = np.asarray(Image.open(path).convert("RGB")).astype(np.float32)
    return torch.from_numpy(values).permute(2, 0, 1)
