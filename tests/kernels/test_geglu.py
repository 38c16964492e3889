"""The gated GELU against diffusers' module in float64."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.activations import GEGLU
from torch import Tensor

from tests.kernels.ops import CONTROL_FACTOR, DTYPES, Ops, gap, tolerance


def by_diffusers(x: Tensor) -> Tensor:
    """What the module does after its projection."""
    module = GEGLU(1, 1)
    module.proj = torch.nn.Identity()
    out: Tensor = module(x)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (33, 63), (5, 500), (130, 4)])
def test_hidden_is_gated_as_diffusers_does_it(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape[0], 2 * shape[1])).to(dtype)
    found = ops("geglu", "geglu", x)
    assert found.dtype == dtype
    assert found.shape == shape
    # the reference rounds the gate before the product, as diffusers does
    room = 2 * tolerance(dtype)
    assert gap(found, by_diffusers(x.double())) <= room


def test_the_reference_is_diffusers_own_arithmetic() -> None:
    torch.manual_seed(0)
    for dtype in (*DTYPES, torch.bfloat16):
        x = torch.randn(9, 34).to(dtype)
        assert torch.equal(Ops("reference", "cpu")("geglu", "geglu", x), by_diffusers(x))


def test_the_halves_the_other_way_round_are_told_apart(ops: Ops) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 10)
    found = ops("geglu", "geglu", x.roll(5, dims=1))
    room = CONTROL_FACTOR * 2 * tolerance(torch.float32)
    assert gap(found, by_diffusers(x.double())) >= room


def test_far_values_neither_overflow_nor_become_nan(ops: Ops) -> None:
    x = torch.tensor([[1.0, 2.0, 60000.0, -60000.0]])
    for dtype in DTYPES:
        assert ops("geglu", "geglu", x.to(dtype)).tolist() == [[60000.0, 0.0]] or dtype.itemsize > 2


def test_hidden_is_overwritten_and_the_gate_is_not(ops: Ops) -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 2 * 63).to(ops.device)
    hidden, gate = x.clone().chunk(2, dim=1)
    found = ops.function("geglu", "geglu")(x)
    assert found.data_ptr() == x.data_ptr()
    assert found.stride() == x.stride()
    assert torch.equal(x[:, 63:], gate)
    assert not torch.equal(x[:, :63], hidden)


def test_an_odd_number_of_columns_is_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="even number of columns, given 3"):
        ops("geglu", "geglu", torch.zeros(2, 3))
