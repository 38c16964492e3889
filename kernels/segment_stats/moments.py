"""Counts, means and sums of squared deviations: what group statistics are made of, and merge by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Moments of every segment (an image, a patch) and group of channels, in fp32.

    Attributes:
        num_values: ``[S]``, in each group: rows of the segment times channels of a group.
        mean: ``[S, G]``.
        squares: ``[S, G]``, sum of the squared deviations from that mean.
    """

    num_values: Tensor
    mean: Tensor
    squares: Tensor


class GroupStats(NamedTuple):
    """What group normalisation needs to know of every image and group, in fp32.

    Attributes:
        mean: ``[images, G]``.
        rstd: ``[images, G]``, one over the standard deviation.
    """

    mean: Tensor
    rstd: Tensor


def merge_moments(moments: Moments, owner: Tensor, num_images: int) -> Moments:
    """Return the moments of images from those of their patches; waits for no device.

    With it, the statistics of an image of which only some patches were recomputed need the rows
    of these alone: the moments of the others are kept from the step that computed them.

    Args:
        moments: of S patches.
        owner: ``[S]`` integers, the image of each patch.
        num_images: how many images there are; those without a patch get zeros.
    """
    num_values, mean, squares = moments
    weight = num_values[:, None]
    zeros = mean.new_zeros(num_images, mean.shape[1])
    totals = num_values.new_zeros(num_images).index_add_(0, owner, num_values)
    means = zeros.index_add(0, owner, weight * mean) / totals.clamp(min=1)[:, None]
    # deviations from the image's mean, not squares less squares: nothing cancels
    apart = (mean - means.index_select(0, owner)).square_()
    return Moments(totals, means, zeros.index_add(0, owner, squares + weight * apart))


def stats_of(moments: Moments, eps: float) -> GroupStats:
    """Return mean and reciprocal standard deviation; no values count as a variance of zero."""
    variance = moments.squares / moments.num_values.clamp(min=1)[:, None]
    return GroupStats(moments.mean, torch.rsqrt(variance + eps))
