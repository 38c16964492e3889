"""Group normalisation of every image in a flat matrix, with SiLU, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.kernels.matrices import accumulator
from ray_cluster.kernels.segment_stats.reference import GroupStats, segment_stats
from ray_cluster.kernels.segment_stats.spans import Runs, check_groups, runs_of

_SMALL = 1 << 16
"""Elements up to which torch's own normalisation is faster on a CPU, transposed there and back."""


@torch.no_grad()
def group_norm_silu(
    x: Tensor,
    offsets: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    silu: bool,
) -> Tensor:
    """Normalise each image over its rows and each group's channels, scale, shift, apply SiLU.

    Args:
        x: ``[N, C]``, contiguous; an image is a span of rows.
        offsets: ``[images + 1]`` integers from 0 to N, where images begin and the last one ends.
        num_groups: equal groups that the channels are split into.
        weight: ``[C]``.
        bias: ``[C]``.
        eps: added to the variance.
        silu: whether SiLU follows.

    Returns:
        ``[N, C]`` in the dtype of ``x``; computed in fp32.

    Raises:
        ValueError: shapes or offsets do not fit.
    """
    check_norm(x, offsets, num_groups, weight, bias)
    dtype = accumulator(x.dtype)
    wide, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    runs = runs_of(offsets, x.shape[0])
    if 0 < x.numel() <= _SMALL:
        out = _by_torch(wide, runs, num_groups, weight, bias, eps)
    else:
        stats = segment_stats(wide, offsets, num_groups, eps)
        out = _by_stats(wide, runs, stats, weight, bias)
    return (F.silu(out, inplace=True) if silu else out).to(x.dtype)


def _by_torch(
    x: Tensor, runs: Runs, num_groups: int, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    # channels first, as torch's exact path wants them: the one for channels last subtracts
    # squares and is wrong by 6e-4 where means are 30 standard deviations
    parts = [
        torch.group_norm(rows.transpose(1, 2), num_groups, weight, bias, eps).transpose(1, 2)
        for rows in runs.views(x)
        if rows.numel()
    ]
    flat = [part.reshape(-1, x.shape[1]) for part in parts]
    # one image's rows are still a view of its channels
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def _by_stats(x: Tensor, runs: Runs, stats: GroupStats, weight: Tensor, bias: Tensor) -> Tensor:
    mean, rstd = stats
    num_images, num_groups = mean.shape
    # [images, groups, channels of a group], then [images, C]
    shape = (num_groups, x.shape[1] // num_groups)
    scale = rstd[:, :, None] * weight.view(shape)
    shift = torch.addcmul(bias.view(shape), mean[:, :, None], scale, value=-1)
    scale, shift = scale.view(num_images, x.shape[1]), shift.view(num_images, x.shape[1])
    out = torch.empty_like(x)
    parts = (runs.views(x), runs.per_image(scale), runs.per_image(shift), runs.views(out))
    for rows, by, to, goal in zip(*parts, strict=True):
        torch.addcmul(to, rows, by, out=goal)
    return out


def check_norm(x: Tensor, offsets: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> None:
    """Refuse parameters of another shape than the rows."""
    check_groups(x, offsets, num_groups)
    if weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        raise ValueError(
            f"weight and bias must have {x.shape[1]} entries, one per channel, given "
            f"{tuple(weight.shape)} and {tuple(bias.shape)}"
        )
