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

from tests.examples import a_few
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


# Triton's interpreter is slow
@settings(a_few, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_sizes_give_the_rows_of_the_images(ops: Ops, data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(0, 90), max_size=5))
    groups, per_group = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 21))
    x, offsets, weight, bias = inputs(sizes, groups * per_group, torch.float32)
    truth = F.silu(group_norm(x, offsets, groups, weight, bias))
    found = ops(*OP, x, offsets, groups, weight, bias, EPS, silu=True)
    assert gap(found, truth) <= ROOM * tolerance(torch.float32)


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
    ],
)
def test_what_does_not_fit_is_refused_by_name(ops: Ops, changes: dict[str, Any], word: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(8, 6), "offsets": offsets_of([5, 3])}
    arguments |= {"groups": 3, "weight": torch.ones(6)} | changes
    positional = (arguments[name] for name in ("x", "offsets", "groups", "weight"))
    group_norm_silu = ops.function(*OP)
    with pytest.raises(ValueError, match=word):
        group_norm_silu(*positional, torch.ones(6), EPS, silu=True)


def test_the_reference_refuses_offsets_that_leave_rows_out() -> None:
    reference = Ops("reference", "cpu")
    x, _, weight, bias = inputs([8], 6, torch.float32)
    for bounds in ([0, 5], [1, 8], [0, 6, 5, 8], [0, 9]):
        with pytest.raises(ValueError, match="rise from 0 to 8"):
            reference(*OP, x, torch.tensor(bounds), 3, weight, bias, EPS, silu=True)
