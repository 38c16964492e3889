"""Group statistics of images in a flat matrix, against numpy-like sums in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ray_cluster.kernels.segment_stats.moments import Moments, merge_moments, stats_of
from tests.kernels.ops import CONTROL_FACTOR, DTYPES, EPS, Ops, gap, offsets_of, tolerance
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


@pytest.mark.parametrize("name", ["segment_stats", "segment_moments"])
def test_channels_without_equal_groups_are_refused(ops: Ops, name: str) -> None:
    for groups in (0, 4):
        arguments = (torch.zeros(3, 6), offsets_of([3]), groups, EPS)
        with pytest.raises(ValueError, match=f"6 channels cannot be split into {groups} equal"):
            ops.function("segment_stats", name)(*arguments[: 4 if name == "segment_stats" else 3])


def test_no_images_have_no_statistics(ops: Ops) -> None:
    mean, rstd = ops("segment_stats", "segment_stats", torch.zeros(0, 6), offsets_of([]), 3, EPS)
    assert mean.shape == rstd.shape == (0, 3)


@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_moments_of_patches_merge_to_those_of_their_images(ops: Ops, shift: float) -> None:
    """Patches of several sizes, one without rows, in no order of their images."""
    sizes, owner = [30, 1, 129, 0, 16, 4], torch.tensor([1, 0, 1, 2, 0, 1])
    x, patches, _, _ = inputs(sizes, 12, torch.float32)
    x += shift
    found = ops("segment_stats", "segment_moments", x, patches, 3)
    moments = Moments(*(one.cpu() for one in found))
    assert moments.num_values.tolist() == [4 * size for size in sizes]
    merged = merge_moments(moments, owner, 4)
    assert merged.num_values.tolist() == [4 * 17, 4 * 163, 0, 0]
    rows = owner.repeat_interleave(torch.tensor(sizes))
    order = rows.argsort(stable=True)
    truth = moments_in_float64(x[order], offsets_of([17, 163, 0, 0]), 3)
    mean, rstd = stats_of(merged, EPS)
    room = tolerance(torch.float32) + 2e-7 * shift
    assert gap(mean / (1 + shift), truth[0] / (1 + shift)) <= room
    assert gap(rstd, (truth[1] + EPS).rsqrt()) <= room
    # without what the patches' means differ by, it is not the images' variance
    alone = torch.zeros_like(moments.squares[:4]).index_add_(0, owner, moments.squares)
    control = stats_of(merged._replace(squares=alone), EPS).rstd
    assert gap(control, (truth[1] + EPS).rsqrt()) >= CONTROL_FACTOR * tolerance(torch.float32)
