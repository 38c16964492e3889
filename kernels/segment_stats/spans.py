"""Where the images of a flat matrix begin and end, for code that runs on the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import Tensor

from ray_cluster.kernels.matrices import check_matrix


@dataclass(frozen=True, slots=True)
class Runs:
    """Images one after the other, in runs of one size.

    Attributes:
        counts: how many images are in each run.
        rows: how many rows each image of a run has; may be 0.
    """

    counts: tuple[int, ...]
    rows: tuple[int, ...]

    def views(self, x: Tensor) -> list[Tensor]:
        """Return the rows ``[N, C]`` as one ``[count, rows, C]`` for every run."""
        sizes = [
            (count, rows, x.shape[1]) for count, rows in zip(self.counts, self.rows, strict=True)
        ]
        parts = x.split_with_sizes([count * rows for count, rows, _ in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def per_image(self, figures: Tensor) -> tuple[Tensor, ...]:
        """Return ``[images, C]`` as one ``[count, 1, C]`` for every run."""
        return figures[:, None].split_with_sizes(self.counts)


def runs_of(offsets: Tensor, num_rows: int) -> Runs:
    """Split images into runs of one size; reads the offsets on the host.

    Raises:
        ValueError: the images do not cover the rows from the first to the last, in order.
    """
    bounds = offsets.tolist()
    sizes = [end - begin for begin, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != num_rows or min(sizes, default=0) < 0:
        raise ValueError(f"offsets must rise from 0 to {num_rows}, the number of rows: {bounds}")
    runs = [(len(list(alike)), rows) for rows, alike in groupby(sizes)]
    counts, rows = zip(*runs, strict=True) if runs else ((), ())
    return Runs(counts, rows)


def check_groups(x: Tensor, offsets: Tensor, num_groups: int) -> None:
    """Refuse what has no segments or no equal groups of channels.

    Raises:
        ValueError: says what was given.
    """
    check_matrix("x", x)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"{x.shape[1]} channels cannot be split into {num_groups} equal groups")
    if offsets.ndim != 1 or offsets.shape[0] < 1 + bool(x.shape[0]):
        raise ValueError(
            f"offsets must be the first row of every image and, at the end, the number of rows: "
            f"given shape {tuple(offsets.shape)} for {x.shape[0]} rows"
        )
