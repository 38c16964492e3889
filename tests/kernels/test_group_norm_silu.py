"""Group normalisation over images in one flat matrix, against torch in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_cluster.kernels.segment_stats.moments import merge_moments, stats_of
from tests.kernels.ops import (
    CONTROL_FACTOR,
    DTYPES,
    EPS,
    Ops,
    gap,
    group_norm,
    offsets_of,
    tolerance,
)

OP = ("group_norm_silu", "group_norm_silu")
# a one-row image with few channels in a group has a variance near zero: its roundings are larger
ROOM = 20
# sizes of the images, channels, groups: what no block divides, blocks that hold many images,
# images of many blocks, and images without rows at the beginning, in between and at the end
SHAPES = [
    ([64], 20, 2),
    ([1, 1, 1], 6, 3),
    ([63, 1, 0, 130, 3], 30, 5),
    ([0, 0, 260, 0], 7, 1),
    ([5] * 9, 3, 3),
    ([200, 77], 150, 3),
    ([260, 260], 150, 3),
    ([], 8, 2),
    ([0], 8, 2),
]


def inputs(sizes: list[int], channels: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(len(sizes) + channels)
    x = (2 * torch.randn(sum(sizes), channels) + 0.5).to(dtype)
    return x, offsets_of(sizes), torch.randn(channels), torch.randn(channels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "channels", "groups"), SHAPES)
def test_each_image_is_normalised_as_if_it_were_alone(
    ops: Ops, sizes: list[int], channels: int, groups: int, dtype: torch.dtype
) -> None:
    x, offsets, weight, bias = inputs(sizes, channels, dtype)
    truth = group_norm(x, offsets, groups, weight, bias)
    for silu in (True, False):
        found = ops(*OP, x, offsets, groups, weight, bias, EPS, silu=silu)
        assert found.dtype == dtype
        assert found.shape == x.shape
        assert gap(found, F.silu(truth) if silu else truth) <= tolerance(dtype)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_sizes_and_any_index_give_the_rows_of_the_images(ops: Ops, data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(0, 90), max_size=5))
    groups, per_group = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 21))
    x, offsets, weight, bias = inputs(sizes, groups * per_group, torch.float32)
    index = torch.tensor(data.draw(st.lists(st.integers(-1, len(x) - 1), max_size=150))).int()
    truth = F.silu(group_norm(x, offsets, groups, weight, bias))
    truth = torch.cat([truth, truth.new_zeros(1, x.shape[1])])[index]
    found = ops(*OP, x, offsets, groups, weight, bias, EPS, silu=True, index=index)
    assert gap(found, truth) <= ROOM * tolerance(torch.float32)


def halo_order(side: int, patch: int) -> Tensor:
    """Row numbers of a square image's patches with one pixel of halo around, -1 outside."""
    image = F.pad(torch.arange(side * side).view(side, side), (1, 1, 1, 1), value=-1)
    patches = image.unfold(0, patch + 2, patch).unfold(1, patch + 2, patch)
    return patches.reshape(-1).int()


def test_patches_with_halo_are_convolved_without_padding_as_the_image_with_it(ops: Ops) -> None:
    side, patch, channels, groups = 6, 3, 8, 2
    x, offsets, weight, bias = inputs([side**2] * 2, channels, torch.float32)
    kernel = torch.randn(5, channels, 3, 3, dtype=torch.float64)
    order = halo_order(side, patch)
    index = torch.cat([order, torch.where(order < 0, -1, order + side**2)])
    found = ops(*OP, x, offsets, groups, weight, bias, EPS, silu=True, index=index)
    patches = found.cpu().double().view(-1, patch + 2, patch + 2, channels).permute(0, 3, 1, 2)
    convolved = F.conv2d(patches, kernel)
    normed = F.silu(group_norm(x, offsets, groups, weight, bias))
    images = normed.view(2, side, side, channels).permute(0, 3, 1, 2)
    whole = F.conv2d(images, kernel, padding=1).unfold(2, patch, patch).unfold(3, patch, patch)
    whole = whole.permute(0, 2, 3, 1, 4, 5).reshape(convolved.shape)
    # a sum of 72 products
    assert gap(convolved, whole) <= 10 * tolerance(torch.float32)
    without_halo = F.pad(patches[:, :, 1:-1, 1:-1], (1, 1, 1, 1))
    control = gap(F.conv2d(without_halo, kernel), whole)
    assert control >= CONTROL_FACTOR * 10 * tolerance(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_per_patch_instead_of_per_image_are_told_apart(
    ops: Ops, dtype: torch.dtype
) -> None:
    x, offsets, weight, bias = inputs([64, 64], 20, dtype)
    truth = group_norm(x, offsets, 2, weight, bias)
    found = ops(*OP, x, offsets_of([16] * 8), 2, weight, bias, EPS, silu=False)
    assert gap(found, truth) >= CONTROL_FACTOR * tolerance(dtype)


def test_a_mean_far_from_zero_does_not_eat_the_variance(ops: Ops) -> None:
    mean = 300.0
    x, offsets, weight, bias = inputs([300, 20], 12, torch.float32)
    x = x / 2 + mean
    truth = group_norm(x, offsets, 3, weight, bias)
    # of fp32 numbers beside 300 the distance is 3e-5: no more than that can be asked for
    room = 6e-5 * float(weight.abs().max())
    assert gap(ops(*OP, x, offsets, 3, weight, bias, EPS, silu=False), truth) <= room
    # the sum of squares less the square of the sum, in the same precision
    controls = []
    for begin, end in pairwise(offsets.tolist()):
        image = x[begin:end].T.reshape(3, -1)
        variance = image.square().mean(1) - image.mean(1).square()
        controls.append((variance / image.double().var(1, correction=0) - 1).abs().max())
    assert max(controls) >= CONTROL_FACTOR * room


def test_recomputed_patches_are_normalised_with_the_whole_images_statistics(ops: Ops) -> None:
    """Moments of the other patches are kept; only rows of the recomputed ones are given."""
    channels, groups, patch = 12, 3, 16
    x, offsets, weight, bias = inputs([64, 32], channels, torch.float32)
    patches = offsets_of([patch] * 6)
    moments = ops("segment_stats", "segment_moments", x, patches, groups)
    owner = torch.tensor([0, 0, 0, 0, 1, 1], device=moments.mean.device)
    stats = stats_of(merge_moments(moments, owner, 2), EPS)
    fresh = torch.tensor([1, 2, 5])
    packed = x.view(6, patch, channels)[fresh].reshape(-1, channels)
    found = ops(
        *(*OP, packed, offsets_of([2 * patch, patch]), groups, weight, bias, EPS),
        silu=True,
        stats=stats,
    )
    truth = F.silu(group_norm(x, offsets, groups, weight, bias)).view(6, patch, channels)[fresh]
    assert gap(found, truth.reshape(-1, channels)) <= tolerance(torch.float32)


def test_an_image_of_nan_stays_alone(ops: Ops) -> None:
    x, offsets, weight, bias = inputs([40, 100, 7], 12, torch.float32)
    truth = group_norm(x, offsets, 3, weight, bias)
    x[40:140, 5] = float("nan")
    found = ops(*OP, x, offsets, 3, weight, bias, EPS, silu=False).cpu()
    others = [*range(40), *range(140, 147)]
    assert gap(found[others], truth[others]) <= tolerance(torch.float32)
    assert found[40:140, 4:8].isnan().all()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"x": torch.zeros(6, 8).T}, "contiguous"),
        ({"x": torch.zeros(2, 3, 4)}, "contiguous"),
        ({"groups": 4}, "4 equal groups"),
        ({"groups": 0}, "0 equal groups"),
        ({"offsets": torch.tensor([0])}, "offsets"),
        ({"weight": torch.ones(5)}, "one per channel"),
        ({"stats": (torch.zeros(3, 3), torch.zeros(3, 3))}, "images and groups"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ops: Ops, changes: dict[str, Any], word: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(8, 6), "offsets": offsets_of([5, 3])}
    arguments |= {"groups": 3, "weight": torch.ones(6), "stats": None} | changes
    positional = (arguments[name] for name in ("x", "offsets", "groups", "weight"))
    group_norm_silu = ops.function(*OP)
    with pytest.raises(ValueError, match=word):
        group_norm_silu(*positional, torch.ones(6), EPS, silu=True, stats=arguments["stats"])


def test_the_reference_refuses_offsets_that_leave_rows_out() -> None:
    reference = Ops("reference", "cpu")
    x, _, weight, bias = inputs([8], 6, torch.float32)
    for bounds in ([0, 5], [1, 8], [0, 6, 5, 8], [0, 9]):
        with pytest.raises(ValueError, match="rise from 0 to 8"):
            reference(*OP, x, torch.tensor(bounds), 3, weight, bias, EPS, silu=True)
