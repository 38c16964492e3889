"""Group statistics of images in a flat matrix, against numpy-like sums in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.ops import DTYPES, EPS, Ops, gap, offsets_of, tolerance
from tests.kernels.test_group_norm_silu import SHAPES, inputs


def moments_in_float64(x: Tensor, offsets: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of every image and group; zeros where there are no rows."""
    pairs = []
    for begin, end in pairwise(offsets.tolist()):
        shape = (end - begin, groups, x.shape[1] // groups)
        values = x[begin:end].double().view(shape).transpose(0, 1).flatten(1)
        empty = torch.zeros(groups, dtype=torch.float64)
        pairs.append(
            (values.mean(1), values.var(1, correction=0)) if end > begin else (empty, empty)
        )
    mean, variance = zip(*pairs, strict=True)
    return torch.stack(mean), torch.stack(variance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "channels", "groups"), [one for one in SHAPES if one[0]])
def test_statistics_are_those_of_each_images_own_rows(
    ops: Ops, sizes: list[int], channels: int, groups: int, dtype: torch.dtype
) -> None:
    x, offsets, _, _ = inputs(sizes, channels, dtype)
    mean, rstd = ops("segment_stats", "segment_stats", x, offsets, groups, EPS)
    true_mean, variance = moments_in_float64(x, offsets, groups)
    # fp16 comes in; statistics are fp32
    assert mean.dtype == rstd.dtype == torch.float32
    assert mean.shape == rstd.shape == (len(sizes), groups)
    assert gap(mean, true_mean) <= tolerance(torch.float32)
    assert gap(rstd, (variance + EPS).rsqrt()) <= tolerance(torch.float32)


def test_channels_without_equal_groups_are_refused(ops: Ops) -> None:
    function = ops.function("segment_stats", "segment_stats")
    for groups in (0, 4):
        with pytest.raises(ValueError, match=f"6 channels cannot be split into {groups} equal"):
            function(torch.zeros(3, 6), offsets_of([3]), groups, EPS)


def test_no_images_have_no_statistics(ops: Ops) -> None:
    mean, rstd = ops("segment_stats", "segment_stats", torch.zeros(0, 6), offsets_of([]), 3, EPS)
    assert mean.shape == rstd.shape == (0, 3)
