"""Linear layers and convolutions with their weights in the order that the device is fastest with.

On a CPU with AVX-512 that order is oneDNN's own, found out once: PyTorch's own layers bring the
weights of every convolution into it in every call, and give matrix products of float32 to another
library. (Measured on one core of an EPYC: linear layers of the reference models take 0.45 to 0.5 of
the time, convolutions 0.55 to 0.95.) These are the operations that ``torch.compile`` uses on such a
CPU. With AVX2 alone they are not used: oneDNN has another order there for some sizes of images, and
brings the weights into it in every call (measured: up to 100 times as long), and its linear layers
are slower than PyTorch's.

Elsewhere the layers of one input become one, and convolutions have their weights channels last, as
the flat matrix has its pixels: otherwise each call would bring one of the two into the other's
order. Layers whose weights are elsewhere until they run (``offload``) are called as they are.

Every layer takes the deltas of its rows too (``deltas.py``), which know the given layers. Rows that
have one before an activation that is part of the product take both apart; the others do not. The
given layers know in which product their weights are now (``weight_parts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ray_cluster.compat import is_offloaded
from ray_cluster.engine.adapters.deltas import Owned, RowDeltas, owned_by
from ray_cluster.engine.adapters.weight_parts import HeldWeight, WeightPart, note_parts
from ray_cluster.engine.models.wide_layers import computing_dtype, has_instructions
from ray_cluster.kernels.geglu.op import geglu

Product = Callable[[Tensor], Tensor]
"""From rows ``[N, C]`` to ``[N, D]``."""
GeluFormula = Literal["none", "tanh"]
"""Of PyTorch's ``gelu``: exact, or with the hyperbolic tangent."""


class Layer(Protocol):
    """A layer over rows."""

    def __call__(self, rows: Tensor, deltas: RowDeltas | None = None, /) -> Tensor:
        """Return it of ``[N, C]``, with what some of the rows add to its product."""


class Convolution(Protocol):
    """A convolution that can leave out the padding around images."""

    @property
    def owned(self) -> tuple[Owned, ...]:
        """The layer that it is."""

    def __call__(self, images: Tensor, deltas: RowDeltas | None = None, /) -> Tensor:
        """Return it of ``[n, C, h, w]``, padded as it is in the model.

        Args:
            deltas: of these images.
        """

    def unpadded(self, windows: Tensor, /) -> Tensor:
        """Return it of ``[n, C, h, w]`` that have what is around them."""


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's layers are the faster ones for a weight, and it is a real one."""
    return weight.device.type == "cpu" and not is_fake(weight) and packs(weight.dtype)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN's layers are the faster ones for weights of a format on this CPU."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and has_instructions(dtype)


def packed_linear(*layers: nn.Module) -> Layer:
    """Return one layer over rows ``[N, C]`` that gives the outputs of all, beside each other.

    The given layers' weights are taken over: they cannot be called any more.

    Args:
        layers: ``Linear``, or ``Conv2d`` over as many pixels as its kernel has; all of one input.
    """
    if any(_is_called(layer) for layer in layers):
        return _Linear(_CalledLinear(layers), layers)
    return _Linear(_product(layers), layers)


def packed_gelu(layer: nn.Module, formula: GeluFormula) -> Layer:
    """Return a linear layer over rows and the GELU of its outputs; its weights are taken over."""
    if _is_called(layer) or not can_pack(_weight(layer)):
        linear = packed_linear(layer)
        return lambda rows, deltas=None: _gelu_(linear(rows, deltas), formula)
    product = _PackedProduct(*_taken([layer]))
    _note([layer], product)
    linear = _Linear(product, [layer])
    return _Fused(
        layer,
        lambda rows: product.gelu(rows, formula),
        lambda rows, deltas=None: _gelu_(linear(rows, deltas), formula),
    )


def packed_geglu(layer: nn.Module) -> Layer:
    """Return a linear layer over rows, the one half of whose outputs gates the other (GEGLU).

    On a CPU the halves are two products: GELU and gating take place while outputs are in the
    registers still, in as much memory as the kernel takes. The weights are taken over.
    """
    if _is_called(layer) or _weight(layer).device.type != "cpu":
        linear = packed_linear(layer)
        return lambda rows, deltas=None: geglu(linear(rows, deltas))
    weight, bias = _taken([layer])
    (hidden, gate), biases = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
    width = len(hidden)
    if not can_pack(weight):
        halves = _PlainProduct(hidden, biases[0]), _PlainProduct(gate, biases[1])
        _note_halves(layer, *halves, width)
        return _Halves(layer, *halves)
    first, second = _PackedProduct(hidden, biases[0]), _PackedProduct(gate, biases[1])
    _note_halves(layer, first, second, width)
    return _Fused(
        layer,
        lambda rows: first.times(rows, second.gelu(rows, "none")),
        _Halves(layer, first, second),
    )


def packed_conv(layer: nn.Conv2d) -> Convolution:
    """Return a convolution over ``[n, C, h, w]``; the given one's weights are taken over."""
    if is_offloaded(layer):
        return _CalledConv(layer)
    if can_pack(layer.weight):
        return _PackedConv(layer)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return _CalledConv(layer)


class _Linear:
    """The product of one input with the weights of some layers."""

    def __init__(self, product: Product, layers: Sequence[nn.Module]) -> None:
        self._product = product
        self._owned = owned_by(layers)

    def __call__(self, rows: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        outputs = self._product(rows)
        if deltas is not None:
            deltas.add(self._owned, rows, outputs)
        return outputs


class _Halves:
    """A product in two halves, the GELU of the second of which gates the first."""

    def __init__(self, layer: nn.Module, hidden: Product, gate: Product) -> None:
        self._layer, self._hidden, self._gate = layer, hidden, gate

    def __call__(self, rows: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        hidden, gate = self._hidden(rows), self._gate(rows)
        if deltas is not None:
            width = hidden.shape[1]
            deltas.add_part(self._layer, rows, hidden, slice(width))
            deltas.add_part(self._layer, rows, gate, slice(width, None))
        return hidden.mul_(_gelu_(gate, "none"))


class _Fused:
    """A layer whose product has its activation in it, except of rows with a delta between them.

    Args:
        apart: product, deltas and activation, one after the other.
    """

    def __init__(self, layer: nn.Module, fused: Product, apart: Layer) -> None:
        self._layer, self._fused, self._apart = layer, fused, apart

    def __call__(self, rows: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        if deltas is None:
            return self._fused(rows)
        parts = [
            self._fused(rows[run]) if own is None else self._apart(rows[run], own)
            for run, own in deltas.runs(self._layer, len(rows))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_called(layer: nn.Module) -> bool:
    """Whether only a layer itself can multiply by its weights: hooks bring them, or they are
    quantised.
    """
    return is_offloaded(layer) or not _weight(layer).is_floating_point()


class _CalledLinear:
    """Layers that are called as they are, one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = tuple(layers)

    def __call__(self, rows: Tensor) -> Tensor:
        outputs = [
            layer(rows.unflatten(1, (-1, *layer.kernel_size)))[:, :, 0, 0]
            if isinstance(layer, nn.Conv2d)
            else layer(rows)
            for layer in self._layers
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class _PlainProduct:
    """A product with weights as PyTorch has them, ``[D, C]``, in the format of the rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.tensor = weight
        self._bias = None if bias is None else bias.to(computing_dtype(bias.dtype, bias.device))

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.tensor.to(rows.dtype), self._bias)

    def plain(self) -> Tensor:
        return self.tensor.clone()

    def ordered(self, plain: Tensor) -> Tensor:
        return plain


class _PackedProduct:
    """A product with weights packed for oneDNN, and with what follows it while it is made."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.tensor = self.ordered(weight)
        self._bias = None if bias is None else bias.contiguous()
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._run_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = self._run(rows, self.tensor, self._bias, "none", [], "")
        return result

    def plain(self) -> Tensor:
        return self.tensor.to_dense()

    def ordered(self, plain: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.contiguous())
        return packed

    def gelu(self, rows: Tensor, formula: GeluFormula) -> Tensor:
        """Return the GELU of its outputs."""
        result: Tensor = self._run(rows, self.tensor, self._bias, "gelu", [], formula)
        return result

    def times(self, rows: Tensor, others: Tensor) -> Tensor:
        """Return its outputs times others, ``[N, D]``."""
        result: Tensor = self._run_binary(rows, others, self.tensor, self._bias, "mul")
        return result


class _CalledConv:
    """PyTorch's layer, whose own hooks may bring its weights to the device."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self._layer = layer
        self.owned = owned_by([layer])

    def __call__(self, images: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        outputs: Tensor = self._layer(images)
        if deltas is not None:
            deltas.add(self.owned, images, outputs)
        return outputs

    def unpadded(self, windows: Tensor) -> Tensor:
        layer = self._layer
        if not is_offloaded(layer) and layer.groups == 1 and windows.shape[2:] == layer.kernel_size:
            # one product for all, by views: as a convolution it takes up to three times as long
            rows, weight = (one.permute(0, 2, 3, 1).flatten(1) for one in (windows, layer.weight))
            bias = None if layer.bias is None else layer.bias.to(rows.dtype)
            return F.linear(rows, weight.to(rows.dtype), bias)[:, :, None, None]
        padding, layer.padding = layer.padding, (0, 0)
        try:
            return self(windows)
        finally:
            layer.padding = padding


class _PackedConv:
    def __init__(self, layer: nn.Conv2d) -> None:
        self.owned = owned_by([layer])
        self._padding = [int(side) for side in layer.padding]
        self._settings = (list(layer.stride), list(layer.dilation), layer.groups)
        self._bias = None if layer.bias is None else layer.bias.detach()
        self.tensor = self.ordered(layer.weight.detach())
        self._run = torch.ops.mkldnn._convolution_pointwise.default
        _drop_weight(layer)
        note_parts(layer, [WeightPart(self)])

    def plain(self) -> Tensor:
        return self.tensor.to_dense()

    def ordered(self, plain: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            plain.contiguous(), self._padding, *self._settings
        )
        return packed

    def __call__(self, images: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        outputs = self._padded(images, self._padding)
        if deltas is not None:
            deltas.add(self.owned, images, outputs)
        return outputs

    def unpadded(self, windows: Tensor) -> Tensor:
        return self._padded(windows, [0, 0])

    def _padded(self, images: Tensor, padding: list[int]) -> Tensor:
        result: Tensor = self._run(
            images, self.tensor, self._bias, padding, *self._settings, "none", [], ""
        )
        return result


def _product(layers: Sequence[nn.Module]) -> _PackedProduct | _PlainProduct:
    """Return the product with the weights of all layers, which it takes over."""
    weight, bias = _taken(layers)
    product = _PackedProduct(weight, bias) if can_pack(weight) else _PlainProduct(weight, bias)
    _note(layers, product)
    return product


def _note(layers: Sequence[nn.Module], weight: HeldWeight) -> None:
    for layer, rows in owned_by(layers):
        note_parts(layer, [WeightPart(weight, rows)])


def _note_halves(layer: nn.Module, first: HeldWeight, second: HeldWeight, width: int) -> None:
    """Note that the weights of a layer's first so many outputs are in one product, the others'
    in another.
    """
    outputs = slice(width), slice(width, None)
    halves = zip((first, second), outputs, strict=True)
    note_parts(layer, [WeightPart(weight, outputs=part) for weight, part in halves])


def _gelu_(rows: Tensor, formula: GeluFormula) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_(rows, approximate=formula)
    return result


def _taken(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Return the weights and biases of layers one below the other; the layers lose theirs."""
    weight = torch.cat([_weight(layer).detach().flatten(1) for layer in layers])
    bias = _joint_bias(layers)
    for layer in layers:
        _drop_weight(layer)
    return weight, bias


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _joint_bias(layers: Sequence[nn.Module]) -> Tensor | None:
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return None
    zeros = (_weight(layer).new_zeros(_weight(layer).shape[0]) for layer in layers)
    return torch.cat(
        [
            bias.detach() if isinstance(bias, Tensor) else zero
            for bias, zero in zip(biases, zeros, strict=True)
        ]
    )


def _drop_weight(layer: nn.Module) -> None:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.new_empty(0)
