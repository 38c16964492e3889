"""Attention of half precision on a CPU is as exact as its rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.engine.models import attend as attending
from ray_cluster.engine.models.attend import attend


def heads(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values, views of rows as the engine has them."""
    torch.manual_seed(0)
    shapes = [(2, 70, 64), (2, 30, 64), (2, 30, 64)]
    rows = [torch.randn(*shape).to(dtype) for shape in shapes]
    return [one.unflatten(2, (4, 16)).transpose(1, 2) for one in rows]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_adds_nothing_to_the_rounding_of_its_result(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "_has_tiles", lambda: False)
    given = heads(dtype)
    truth = F.scaled_dot_product_attention(*(one.double() for one in given))
    found, plain = attend(*given), F.scaled_dot_product_attention(*given)
    rounding = error(truth.to(dtype), truth)
    assert found.dtype is dtype
    assert error(found, truth) <= 1.02 * rounding
    # what PyTorch's own adds is seen by this
    assert error(plain, truth) > 1.1 * rounding


@pytest.mark.parametrize(("dtype", "tiles"), [(torch.bfloat16, True), (torch.float32, False)])
def test_elsewhere_it_is_pytorchs_own(
    dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "_has_tiles", lambda: tiles)
    given = heads(dtype)
    assert torch.equal(attend(*given), F.scaled_dot_product_attention(*given))
