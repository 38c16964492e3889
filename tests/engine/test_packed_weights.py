"""Layers with what follows them are what PyTorch's layers give, packed for oneDNN and not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_cluster.engine import packed_weights
from ray_cluster.engine.packed_weights import GeluFormula, packed_geglu, packed_gelu
from tests.engine.harness import CALL_TOLERANCE, difference

Record = Callable[[str, object], None]


@pytest.fixture(params=["packed", "plain", "offloaded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How layers are called; where oneDNN's are not the faster ones, nothing is packed."""
    if request.param == "plain":
        monkeypatch.setattr(packed_weights, "can_pack", lambda _weight: False)
    return str(request.param)


def layer_of(way: str, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(24, outputs, bias=bias)
    if way == "offloaded":
        layer._hf_hook = nn.Identity()
    return layer


def double(layer: nn.Linear, rows: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach().double()
    return F.linear(rows.double(), layer.weight.detach().double(), bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_the_gate_is_behind_the_second_half(
    way: str, num_rows: int, bias: bool, record: Record
) -> None:
    layer, rows = layer_of(way, 2 * 40, bias=bias), 4 * torch.randn(num_rows, 24)
    hidden, gate = double(layer, rows).chunk(2, dim=1)
    with torch.inference_mode():
        found = packed_geglu(layer)(rows)
    error = difference(found, hidden * F.gelu(gate))
    record(f"geglu {way}", error)
    assert error <= CALL_TOLERANCE
    # the other half, and the other formula, are told apart
    assert difference(found, gate * F.gelu(hidden)) > 1000 * CALL_TOLERANCE
    assert difference(found, hidden * F.gelu(gate, approximate="tanh")) > CALL_TOLERANCE


@pytest.mark.parametrize("formula", ["none", "tanh"])
def test_either_formula_of_the_gelu(way: str, formula: GeluFormula, record: Record) -> None:
    layer, rows = layer_of(way, 40), 4 * torch.randn(7, 24)
    expected = {name: F.gelu(double(layer, rows), approximate=name) for name in ("none", "tanh")}
    with torch.inference_mode():
        found = packed_gelu(layer, formula)(rows)
    error = difference(found, expected.pop(formula))
    record(f"gelu {formula} {way}", error)
    assert error <= CALL_TOLERANCE
    (other,) = expected.values()
    assert difference(found, other) > CALL_TOLERANCE
