"""Low-rank products of groups of rows against one group after the other in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ray_cluster.kernels.grouped_low_rank.reference import RowGroups
from tests.kernels.ops import CONTROL_FACTOR, DTYPES, Ops, gap, tolerance

OP = ("grouped_low_rank", "grouped_low_rank")


def given(
    groups: RowGroups, count: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random outputs, inputs and factors, with rows before and behind the groups."""
    torch.manual_seed(count)
    num_inputs, rank, num_outputs = sizes
    num_rows = groups.first + count * max(groups.step, groups.length) + 3
    shapes = (
        (num_rows, num_outputs),
        (num_rows, num_inputs),
        (count, rank, num_inputs),
        (count, rank, num_outputs),
    )
    outputs, inputs, shrink, expand = (torch.randn(shape) for shape in shapes)
    shrink /= max(num_inputs, 1) ** 0.5
    expand /= max(rank, 1) ** 0.5
    return outputs.to(dtype), inputs.to(dtype), shrink.to(dtype), expand.to(dtype)


def one_by_one(
    outputs: Tensor, inputs: Tensor, shrink: Tensor, expand: Tensor, groups: RowGroups
) -> Tensor:
    outputs, inputs, shrink, expand = (one.double() for one in (outputs, inputs, shrink, expand))
    for number in range(len(shrink)):
        first = groups.first + number * groups.step
        own = slice(first, first + groups.length)
        outputs[own] += inputs[own] @ shrink[number].T @ expand[number]
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "count", "sizes"),
    [
        (RowGroups(0, 64, 64), 3, (63, 4, 96)),
        (RowGroups(5, 17, 40), 4, (32, 16, 500)),
        (RowGroups(2, 1, 1), 5, (130, 3, 33)),
        (RowGroups(1, 70, 70), 1, (20, 40, 1)),
        (RowGroups(0, 0, 0), 2, (8, 4, 8)),
        (RowGroups(0, 8, 8), 0, (8, 4, 8)),
    ],
)
def test_each_group_gains_its_own_product(
    ops: Ops,
    groups: RowGroups,
    count: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    tensors = given(groups, count, sizes, dtype)
    truth = one_by_one(*tensors, groups)
    found = ops(*OP, *tensors, groups)
    assert found.dtype == dtype
    # the shrunk rows are rounded, and the result
    assert gap(found, truth) <= 4 * tolerance(dtype)
    if groups.length and count > 1:
        outputs, inputs, shrink, expand = tensors
        swapped = ops(*OP, outputs, inputs, shrink.roll(1, 0), expand, groups)
        assert gap(swapped, truth) >= CONTROL_FACTOR * 4 * tolerance(torch.float32)


def test_columns_beside_others_are_added_to_and_no_others(ops: Ops) -> None:
    groups = RowGroups(3, 10, 12)
    outputs, inputs, shrink, expand = given(groups, 2, (24, 8, 20), torch.float32)
    wide = torch.randn(len(outputs), 50).to(ops.device)
    before = wide.clone()
    part = (one.to(ops.device) for one in (inputs, shrink, expand))
    ops.function(*OP)(wide[:, 15:35], *part, groups)
    truth = one_by_one(before[:, 15:35].cpu(), inputs, shrink, expand, groups)
    assert gap(wide[:, 15:35], truth) <= 4 * tolerance(torch.float32)
    before[:, 15:35] = wide[:, 15:35]
    assert torch.equal(wide, before)
    for row in (*range(3), 13, 14, *range(25, len(wide))):
        assert torch.equal(wide[row, 15:35].cpu(), truth[row].float())


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    groups = RowGroups(0, 4, 4)
    outputs, inputs, shrink, expand = given(groups, 2, (8, 4, 6), torch.float32)
    function = ops.function(*OP)
    for arguments, said in (
        ((outputs, inputs[1:], shrink, expand, groups), r"inputs \[N, C\]"),
        ((outputs, inputs, shrink, expand[:, 1:], groups), r"expand \[G, r, D\]"),
        ((outputs, inputs, shrink.half(), expand, groups), "one dtype"),
        ((outputs, inputs.T.contiguous().T, shrink, expand, groups), "beside each other"),
        ((outputs, inputs, shrink, expand, RowGroups(0, 4, 3)), "overlap"),
        ((outputs, inputs, shrink, expand, RowGroups(9, 4, 4)), "not all in 11 rows"),
    ):
        with pytest.raises(ValueError, match=said):
            function(*arguments)
