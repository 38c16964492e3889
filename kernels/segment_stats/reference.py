"""Group statistics of every image in a flat matrix, in torch.

Two passes, so that nothing cancels: means per channel first, then squared deviations from them.
Channels come before groups because rows of ``[N, C]`` are summed fast and groups of a row are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ray_cluster.kernels.matrices import accumulator
from ray_cluster.kernels.segment_stats.spans import check_groups, runs_of


class GroupStats(NamedTuple):
    """What group normalisation needs to know of every image and group, in fp32.

    Attributes:
        mean: ``[images, G]``.
        rstd: ``[images, G]``, one over the standard deviation.
    """

    mean: Tensor
    rstd: Tensor


@torch.no_grad()
def segment_stats(x: Tensor, offsets: Tensor, num_groups: int, eps: float) -> GroupStats:
    """Return mean and reciprocal standard deviation of every image and group.

    Args:
        x: ``[N, C]``, contiguous; an image is a span of rows.
        offsets: ``[images + 1]`` integers from 0 to N, where images begin and the last one ends.
            On CUDA only the reference reads them on the host.
        num_groups: equal groups that the channels are split into.
        eps: added to the variance.

    Returns:
        ``[images, num_groups]`` each, in fp32 (fp64 for an fp64 matrix).

    Raises:
        ValueError: shapes or offsets do not fit.
    """
    check_groups(x, offsets, num_groups)
    views = (runs := runs_of(offsets, x.shape[0])).views(x.to(accumulator(x.dtype)))
    num_rows = offsets.diff().to(accumulator(x.dtype))
    means = _per_image(views, num_rows, x) / num_rows.clamp(min=1)[:, None]
    distances = (rows - mean for rows, mean in zip(views, runs.per_image(means), strict=True))
    squares = _per_image((one.square_() for one in distances), num_rows, x)
    # [images, groups, channels of a group]
    shape = (num_rows.shape[0], num_groups, x.shape[1] // num_groups)
    means, squares = means.view(shape), squares.view(shape)
    mean = means.mean(2)
    apart = (means - mean[:, :, None]).square_().sum(2)
    squares = torch.addcmul(squares.sum(2), num_rows[:, None], apart)
    # no values count as a variance of zero
    variance = squares / (num_rows * shape[2]).clamp(min=1)[:, None]
    return GroupStats(mean, torch.rsqrt(variance + eps))


def _per_image(views: Iterable[Tensor], num_rows: Tensor, x: Tensor) -> Tensor:
    """Return the sums over the rows of every image, ``[images, C]``."""
    sums = [one.sum(1) for one in views]
    return torch.cat(sums) if sums else num_rows.new_zeros(0, x.shape[1])
