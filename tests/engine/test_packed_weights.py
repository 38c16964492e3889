"""Layers with what follows them are what PyTorch's layers give, packed for oneDNN and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_cluster.engine.adapters.deltas import RowDeltas
from ray_cluster.engine.models import packed_weights
from ray_cluster.engine.models.packed_weights import (
    GeluFormula,
    packed_conv,
    packed_geglu,
    packed_gelu,
    packed_linear,
)
from tests.engine.harness import CALL_TOLERANCE, CONTROL_FACTOR, difference
from tests.engine.low_rank import LowRank

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


def joint(*layers: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda rows: torch.cat([layer(rows) for layer in layers], dim=1)


def gated(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def run(rows: Tensor) -> Tensor:
        hidden, gate = layer(rows).chunk(2, dim=1)
        return hidden * F.gelu(gate)

    return run


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "joint", "gelu", "geglu", "conv"])
def test_rows_with_deltas_are_those_of_merged_weights_and_others_stay_to_the_bit(
    way: str, kind: str
) -> None:
    """Rows 2 to 5, 5 to 9 and 12 have some; of two layers beside each other, only the second."""
    layers: list[nn.Module]
    if kind == "conv":
        layers = [nn.Conv2d(24, 40, 3, padding=1)]
        rows = torch.randn(14, 24, 6, 5)
    else:
        layers = [layer_of(way, 40) for _ in range(1 + (kind == "joint"))]
        rows = torch.randn(14, 24)
    changed, generator = layers[-1], torch.Generator().manual_seed(0)
    deltas = [LowRank.random(changed, rank, generator) for rank in (2, 3)]
    plain = {
        "linear": lambda: layers[0],
        "joint": lambda: joint(*layers),
        "gelu": lambda: lambda rows: F.gelu(layers[0](rows)),
        "geglu": lambda: gated(layers[0]),
        "conv": lambda: layers[0],
    }[kind]
    expected = [plain()(rows)]
    for delta in deltas:
        changed.weight.data += delta.weight
        expected.append(plain()(rows))
        changed.weight.data -= delta.weight
    packed: Any = {
        "linear": packed_linear,
        "joint": packed_linear,
        "gelu": lambda layer: packed_gelu(layer, "none"),
        "geglu": packed_geglu,
        "conv": packed_conv,
    }[kind](*layers)
    owners = [0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 1, 0]
    owned = [None, *({changed: delta} for delta in deltas)]
    without = packed(rows)
    found = packed(rows, RowDeltas.of([owned[owner] for owner in owners]))
    for row, owner in enumerate(owners):
        assert difference(found[row], expected[owner][row]) <= CALL_TOLERANCE
        if owner == 0:
            assert torch.equal(found[row], without[row])
        else:
            assert difference(found[row], expected[0][row]) >= CONTROL_FACTOR * CALL_TOLERANCE
