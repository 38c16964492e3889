"""Where the weights of a model's layers are, so that others can take their place.

Executors take the weights of diffusers' layers over, and bring them into an order of their own,
some of them several in one. Each layer then knows where its weight is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

_KEY = "_ray_cluster_weight_parts"
_ALL = slice(None)


class HeldWeight(Protocol):
    """A weight that a product reads in every call.

    Attributes:
        tensor: it, in the order that the product wants; may be replaced between two calls.
    """

    tensor: Tensor

    def plain(self) -> Tensor:
        """Return a copy in PyTorch's order, ``[D, ...]``."""

    def ordered(self, plain: Tensor, /) -> Tensor:
        """Return a weight ``[D, ...]`` in the product's order."""


class WeightPart(NamedTuple):
    """Where a part of a layer's weight is.

    Attributes:
        rows: of the plain weight.
        outputs: of the layer, whose weights these rows are.
    """

    weight: HeldWeight
    rows: slice = _ALL
    outputs: slice = _ALL


def note_parts(layer: nn.Module, parts: Sequence[WeightPart]) -> None:
    """Note where the weight of a layer is from now on."""
    layer.__dict__[_KEY] = tuple(parts)


def parts_of(layer: nn.Module) -> tuple[WeightPart, ...]:
    """Return where the weight of a linear layer or convolution is; in itself if nothing took it."""
    found: tuple[WeightPart, ...] | None = layer.__dict__.get(_KEY)
    if found is None:
        found = (WeightPart(_OwnWeight(layer)),)
        note_parts(layer, found)
    return found


class _OwnWeight:
    """The weight of a layer that is called as it is."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    @property
    def tensor(self) -> Tensor:
        weight = self._layer.weight
        assert isinstance(weight, Tensor)
        return weight

    @tensor.setter
    def tensor(self, other: Tensor) -> None:
        # the very parameter comes back later
        is_parameter = isinstance(other, nn.Parameter)
        self._layer.weight = other if is_parameter else nn.Parameter(other, requires_grad=False)

    def plain(self) -> Tensor:
        return self.tensor.detach().clone()

    def ordered(self, plain: Tensor) -> Tensor:
        # convolutions may have their channels last
        return torch.empty_like(self.tensor.detach()).copy_(plain)
