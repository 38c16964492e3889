"""Rows packed and put back, bit for bit, also where a matrix has more than 2^31 elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import a_few
from tests.kernels.ops import Ops

GATHER = ("row_gather", "row_gather")
SCATTER = ("row_scatter", "row_scatter")
KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.int32)
# Triton's interpreter is slow
few = settings(
    a_few, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def matrix(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Rows with every bit pattern that matters, NaN among them."""
    torch.manual_seed(num_columns)
    x = (1000 * torch.randn(num_rows, num_columns)).to(dtype)
    if dtype.is_floating_point and num_rows:
        x[num_rows // 2] = float("nan")
    return x


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN counting as equal to itself."""
    flat = (tensor.cpu().contiguous().flatten() for tensor in (one, other))
    return one.dtype == other.dtype and torch.equal(*(bits.view(torch.uint8) for bits in flat))


@few
@given(data=st.data())
def test_gathered_rows_are_the_named_ones_and_zeros(ops: Ops, data: Any) -> None:
    num_rows, num_columns = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 150))
    index = data.draw(st.lists(st.integers(-1, num_rows - 1), max_size=70))
    x = matrix(num_rows, num_columns, data.draw(st.sampled_from(KINDS)))
    number = data.draw(st.sampled_from([torch.int32, torch.int64]))
    found = ops(*GATHER, x, torch.tensor(index, dtype=number))
    truth = [x[row] if row >= 0 else torch.zeros_like(x[0:1].sum(0)) for row in index]
    assert found.shape == (len(index), num_columns)
    assert same_bits(found, torch.stack(truth).to(x.dtype) if truth else x[:0])


@few
@given(data=st.data())
def test_scattered_rows_replace_the_named_ones_and_no_others(ops: Ops, data: Any) -> None:
    num_rows, num_columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150))
    index = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=num_rows, unique=True))
    for _ in range(data.draw(st.integers(0, 3))):
        index.insert(data.draw(st.integers(0, len(index))), -1)
    dtype = data.draw(st.sampled_from(KINDS))
    base = matrix(num_rows, num_columns, dtype)
    packed = matrix(len(index), num_columns, dtype).flip(1).contiguous()
    truth = base.clone()
    for row, values in zip(index, packed, strict=True):
        if row >= 0:
            truth[row] = values
    before = base.clone()
    for in_place in (False, True):
        found = ops(*SCATTER, base, packed, torch.tensor(index).int(), in_place=in_place)
        assert same_bits(found, truth)
        assert same_bits(base, before)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_base_changes_only_if_told_so(ops: Ops, in_place: bool) -> None:
    base = torch.zeros(5, 3, device=ops.device)
    index = torch.tensor([2], device=ops.device)
    found = ops.function(*SCATTER)(
        base, torch.ones(1, 3, device=ops.device), index, in_place=in_place
    )
    assert found.sum() == 3
    assert (found is base) == in_place
    assert base.sum() == 3 * in_place


def test_a_mask_packs_its_rows_and_puts_them_back(ops: Ops) -> None:
    base = matrix(70, 33, torch.float32)
    mask = torch.rand(70) < 0.4
    packed = ops(*GATHER, base, mask).cpu()
    assert same_bits(packed, base[mask])
    assert same_bits(ops(*SCATTER, torch.zeros_like(base), packed, mask)[mask], base[mask])
    nothing = ops(*GATHER, base, torch.zeros(70, dtype=torch.bool)).cpu()
    assert nothing.shape == (0, 33)
    assert same_bits(ops(*SCATTER, base, nothing, torch.full((0,), 0)), base)


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    base, index = torch.zeros(4, 3), torch.tensor([0, 1])
    for arguments, word in (
        ((base.T, index), "contiguous"),
        ((base, index.float()), "vector of row numbers"),
        ((base, index[None]), "vector of row numbers"),
        ((base, torch.ones(3, dtype=torch.bool)), "given 3 for 4 rows"),
    ):
        with pytest.raises(ValueError, match=word):
            ops.function(*GATHER)(*arguments)
    for packed in (torch.zeros(1, 3), torch.zeros(2, 4), torch.zeros(2, 3).half()):
        with pytest.raises(ValueError, match="one row per entry"):
            ops(*SCATTER, base, packed, index)


@pytest.fixture
def vast(tmp_path: Path) -> Tensor:
    """More than 2^31 elements in a file of holes: it takes the room of what is written."""
    num_columns = 64
    num_rows = 2**31 // num_columns + 10
    flat = torch.from_file(
        str(tmp_path / "rows"), shared=True, size=num_rows * num_columns, dtype=torch.float16
    )
    return flat.view(num_rows, num_columns)


def test_rows_beyond_two_to_the_31_elements_are_reached(triton_ops: Ops, vast: Tensor) -> None:
    if triton_ops.device != "cpu":
        pytest.skip("a file's rows are reached by the interpreter alone")
    last = len(vast) - 1
    index = torch.tensor([last, 3, -1, last - 1], dtype=torch.int32)
    packed = matrix(4, 64, torch.float16).nan_to_num()
    triton_ops.function(*SCATTER)(vast, packed, index, in_place=True)
    assert same_bits(vast[[last, 3, last - 1]], packed[[0, 1, 3]])
    gathered = triton_ops.function(*GATHER)(vast, index)
    packed[2] = 0
    assert same_bits(gathered, packed)
