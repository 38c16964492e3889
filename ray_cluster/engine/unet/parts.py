"""The parts of a UNet over the flat matrix of a batch's pixels; what they compute is diffusers'.

Each takes and returns ``[N, C]`` at one level of the layout, in which of some images only the
active patches' pixels may be: see ``grids.py``. The weights are those of the diffusers
modules that they are built from, taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.compat import is_offloaded
from ray_cluster.engine.batch.token_layout import Segment
from ray_cluster.engine.models.attend import attend
from ray_cluster.engine.models.packed_weights import packed_conv, packed_geglu, packed_linear
from ray_cluster.engine.unet.grids import Grid, Move, PatchGrid, as_rows
from ray_cluster.engine.unet.halo import Reach, Size
from ray_cluster.kernels.by_device import has_triton
from ray_cluster.kernels.group_norm_silu.op import group_norm_silu


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the images of a ring are conditioned on, in the layout's order, and where they lie.

    Attributes:
        time: ``[R, S]``, the projections of the time embedding for all resnets beside each other.
        keys_values: ``[R, T, P]``, the projections of the prompt for all cross-attentions.
        grids: where the images' pixels lie, level by level.
    """

    time: Tensor
    keys_values: Tensor
    grids: Sequence[Grid]


def per_size(grid: Grid, compute: Callable[[Segment], Tensor]) -> Tensor:
    """Return the flat matrix of what is computed for each size as ``[n, C, h, w]``."""
    return grid.stacked([as_rows(compute(segment)) for segment in grid.level.segments])


def has_row_norm(norm: Any) -> bool:
    """Whether the kernel for rows of pixels normalises where a norm's weights are.

    PyTorch's own on CUDA wants channels first: it would copy the pixels into that order, and hand
    them on in it to convolutions that want them channels last again. Weights that are elsewhere
    until they are called (``offload``) are for PyTorch's own.
    """
    return norm.weight.is_cuda and has_triton() and not is_offloaded(norm)


class Normalise:
    """Group normalisation of whole images, and the activation (SiLU) if there is one after it.

    On a CPU it is computed in float32 whatever the model's dtype: in bfloat16 PyTorch's own takes
    four times as long. On CUDA one kernel does both, in float32 inside, in the pixels' own order.
    """

    def __init__(self, norm: Any, *, activates: bool) -> None:
        self._norm = norm
        self._activates = activates
        self._of_rows = has_row_norm(norm)
        self._float: tuple[Tensor, Tensor] | None = None
        if norm.weight.device.type == "cpu" and norm.weight.dtype is not torch.float32:
            self._float = (norm.weight.detach().float(), norm.bias.detach().float())

    def of_rows(self, flat: Tensor, grid: Grid) -> Tensor:
        """Return the flat matrix of whole images normalised; on CUDA all sizes in one call."""
        if self._of_rows:
            # without the rows to spare
            rows = flat[: grid.level.num_tokens]
            return grid.stacked([self._by_kernel(rows, grid.level.bounds(flat.device))])
        return per_size(grid, lambda segment: self(segment.as_images(flat), segment))

    def __call__(self, images: Tensor, segment: Segment) -> Tensor:
        """Return ``[n, C, h, w]`` normalised; the segment says where each image's rows are."""
        if self._of_rows:
            # a view of a single image with its channels first would have its columns far apart
            rows = as_rows(images).contiguous()
            flat = self._by_kernel(rows, segment.bounds(rows.device))
            return flat.view(len(images), *images.shape[2:], -1).permute(0, 3, 1, 2)
        if self._float is None:
            normed: Tensor = self._norm(images)
        else:
            groups, eps = self._norm.num_groups, self._norm.eps
            normed = F.group_norm(images.float(), groups, *self._float, eps)
        if self._activates:
            normed = F.silu(normed, inplace=True)
        return normed.to(images.dtype)

    def _by_kernel(self, rows: Tensor, bounds: Tensor) -> Tensor:
        norm = self._norm
        settings = (norm.num_groups, norm.weight, norm.bias, norm.eps)
        return group_norm_silu(rows, bounds, *settings, silu=self._activates)


class Resnet:
    """Two convolutions with norms, the time embedding between them, and the shortcut.

    Args:
        resnet: diffusers' ``ResnetBlock2D``.
        time: where its projection of the time embedding stands in ``Conditions.time``.
    """

    def __init__(self, resnet: Any, time: slice) -> None:
        self._norm1 = Normalise(resnet.norm1, activates=True)
        self._norm2 = Normalise(resnet.norm2, activates=True)
        self._conv1, self._conv2 = packed_conv(resnet.conv1), packed_conv(resnet.conv2)
        shortcut = resnet.conv_shortcut
        self._shortcut = None if shortcut is None else packed_linear(shortcut)
        self._time = time

    def __call__(self, flat: Tensor, grid: Grid, conditions: Conditions) -> Tensor:
        kept = flat if self._shortcut is None else self._shortcut(flat, grid.deltas)
        if isinstance(grid, PatchGrid):
            return self._of_patches(flat, grid, conditions).add_(kept)
        time = conditions.time[:, self._time, None, None]

        def compute(segment: Segment) -> Tensor:
            deltas = grid.deltas_in(segment)
            hidden = self._conv1(self._norm1(segment.as_images(flat), segment), deltas)
            hidden += time[segment.images]
            hidden = self._conv2(self._norm2(hidden, segment), deltas)
            hidden += segment.as_images(kept)
            return hidden

        return per_size(grid, compute)

    def _of_patches(self, flat: Tensor, grid: PatchGrid, conditions: Conditions) -> Tensor:
        """Return what is added to the shortcut."""
        normed = self._norm1.of_rows(grid.joined(flat), grid)
        hidden = grid.convolved(normed, self._conv1)
        hidden += grid.per_row(conditions.time[:, self._time])
        normed = self._norm2.of_rows(grid.joined(hidden), grid)
        return grid.convolved(normed, self._conv2)


class Attention:
    """Attention of an image's pixels, to each other or to the prompt.

    Args:
        attention: diffusers' ``Attention``.
        prompt: where its keys and values stand in ``Conditions.keys_values``; None for attention
            of the pixels to each other.
    """

    def __init__(self, attention: Any, prompt: slice | None) -> None:
        self._heads = attention.heads
        self._prompt = prompt
        inputs = [attention.to_q]
        if prompt is None:
            inputs += [attention.to_k, attention.to_v]
        self._inputs = packed_linear(*inputs)
        self._output = packed_linear(attention.to_out[0])

    def __call__(self, rows: Tensor, grid: Grid, conditions: Conditions) -> Tensor:
        projected = self._inputs(rows, grid.deltas)
        if self._prompt is None:
            width = projected.shape[1] // 3
            both = grid.joined(projected[:, width:])
            keys_values = [span.of(both) for span in grid.key_spans]
            projected = projected[:, :width]
        else:
            prompts = conditions.keys_values[:, :, self._prompt]
            keys_values = [prompts[span.images] for span in grid.spans]
        attended = [
            self._attend(span.of(projected), both)
            for span, both in zip(grid.spans, keys_values, strict=True)
        ]
        return self._output(grid.stacked(attended), grid.deltas)

    def _attend(self, query: Tensor, keys_values: Tensor) -> Tensor:
        """Return ``[n * L, C]`` of sequences of one length, ``[n, L, C]`` and ``[n, K, 2 * C]``."""
        [query] = self._split(query, 1)
        key, value = self._split(keys_values, 2)
        attended = attend(query, key, value)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _split(self, projected: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return ``[n, L, count * C]`` as ``count`` times ``[n, heads, L, d]``, views."""
        heads = projected.unflatten(2, (count, self._heads, -1)).permute(2, 0, 3, 1, 4)
        return tuple(heads[index] for index in range(count))


class FeedForward:
    """The gated feed-forward layer (GEGLU)."""

    def __init__(self, feed_forward: Any) -> None:
        gated, _, output = feed_forward.net
        self._gated, self._output = packed_geglu(gated.proj), packed_linear(output)

    def __call__(self, rows: Tensor, grid: Grid) -> Tensor:
        return self._output(self._gated(rows, grid.deltas), grid.deltas)


class TransformerLayer:
    """Self-attention, cross-attention and feed-forward over rows (``BasicTransformerBlock``)."""

    def __init__(self, layer: Any, prompt: slice) -> None:
        self._norms = (layer.norm1, layer.norm2, layer.norm3)
        self._pixels = Attention(layer.attn1, None)
        self._prompt = Attention(layer.attn2, prompt)
        self._feed_forward = FeedForward(layer.ff)

    def __call__(self, rows: Tensor, grid: Grid, conditions: Conditions) -> Tensor:
        first, second, third = self._norms
        rows = self._pixels(first(rows), grid, conditions).add_(rows)
        rows = self._prompt(second(rows), grid, conditions).add_(rows)
        return self._feed_forward(third(rows), grid).add_(rows)


class Transformer:
    """A stack of transformer layers between two projections (``Transformer2DModel``)."""

    def __init__(self, transformer: Any, prompts: Sequence[slice]) -> None:
        self._norm = Normalise(transformer.norm, activates=False)
        self._input = packed_linear(transformer.proj_in)
        self._layers = [
            TransformerLayer(layer, prompt)
            for layer, prompt in zip(transformer.transformer_blocks, prompts, strict=True)
        ]
        self._output = packed_linear(transformer.proj_out)

    def __call__(self, flat: Tensor, grid: Grid, conditions: Conditions) -> Tensor:
        normed = self._norm.of_rows(grid.joined(flat), grid)
        rows = self._input(grid.own(normed), grid.deltas)
        for layer in self._layers:
            rows = layer(rows, grid, conditions)
        return self._output(rows, grid.deltas).add_(flat)


class Convolve:
    """One convolution at one level: the first and the last layer of a UNet."""

    def __init__(self, conv: Any) -> None:
        self._conv = packed_conv(conv)

    def __call__(self, flat: Tensor, grid: Grid) -> Tensor:
        return grid.convolved(flat, self._conv)


class Downsample:
    """The convolution that halves the resolution (``Downsample2D``)."""

    def __init__(self, downsample: Any) -> None:
        self._conv = packed_conv(downsample.conv)
        self._pads_after = downsample.padding == 0
        self._reach = Reach(stride=2, before=0 if self._pads_after else 1)

    def __call__(self, flat: Tensor, grid: Grid, target: Grid) -> Tensor:
        move = Move(target, self._reach, self._padded)
        return grid.convolved(grid.joined(flat), self._conv, move)

    def _padded(self, images: Tensor, _size: Size) -> Tensor:
        return F.pad(images, (0, 1, 0, 1)) if self._pads_after else images


class Upsample:
    """Doubling of the resolution and a convolution (``Upsample2D``)."""

    def __init__(self, upsample: Any) -> None:
        self._conv = packed_conv(upsample.conv)

    def __call__(self, flat: Tensor, grid: Grid, target: Grid) -> Tensor:
        move = Move(target, Reach(growth=2), _grown)
        return grid.convolved(grid.joined(flat), self._conv, move)


class LastNorm:
    """The norm and activation before the last convolution."""

    def __init__(self, norm: Any) -> None:
        self._norm = Normalise(norm, activates=True)

    def __call__(self, flat: Tensor, grid: Grid) -> Tensor:
        return self._norm.of_rows(flat, grid)


def _grown(images: Tensor, size: Size) -> Tensor:
    return F.interpolate(images, size=size, mode="nearest")
