"""The ops as one would write them: image by image, one torch call after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.kernels.grouped_low_rank.reference import RowGroups


def group_norm_silu(
    x: Tensor, rows: Sequence[int], groups: int, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Normalise each image in the order that torch wants, and put it back."""
    # [n, C] -> [1, C, n]
    images = (F.group_norm(one.T[None], groups, weight, bias, eps) for one in x.split([*rows]))
    return torch.cat([F.silu(image)[0].T for image in images])


def segment_stats(x: Tensor, rows: Sequence[int], groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of each image's groups."""
    pairs = []
    for image in x.split([*rows]):
        grouped = image.float().view(len(image), groups, -1)
        variance, mean = torch.var_mean(grouped, dim=(0, 2), correction=0)
        pairs.append((mean, torch.rsqrt(variance + eps)))
    mean, rstd = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return mean, rstd


def geglu(x: Tensor) -> Tensor:
    """The gated GELU by its formula."""
    hidden, gate = x.chunk(2, dim=-1)
    return hidden * (gate * 0.5 * (1.0 + torch.erf(gate * 0.5**0.5)))


def row_scatter(base: Tensor, packed: Tensor, mask: Tensor) -> Tensor:
    """A copy of ``base`` with the rows of a mask replaced."""
    out = base.clone()
    out[mask] = packed
    return out


def grouped_low_rank(
    outputs: Tensor, inputs: Tensor, shrink: Tensor, expand: Tensor, groups: RowGroups
) -> Tensor:
    """Group by group, with memory for each product."""
    for number, (down, up) in enumerate(zip(shrink, expand, strict=True)):
        first = groups.first + number * groups.step
        own = slice(first, first + groups.length)
        outputs[own] += inputs[own] @ down.T @ up
    return outputs


def sampler_update(
    latents: Tensor,
    output: Tensor,
    previous: Tensor,
    noise: Tensor,
    table: Sequence[Sequence[float]],
    rows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Each image by itself, as a sampler object per request would do it."""
    advanced, cleaned = [], []
    tensors = (latents, output, previous, noise)
    for row, parts in zip(table, _images(tensors, rows), strict=True):
        from_latents, from_output, keep, direct, toward, history, share, clip = row
        x, m, before, z = parts
        denoised = (from_latents * x + from_output * m).clamp(-clip, clip)
        advanced.append(keep * x + direct * m + toward * denoised + history * before + share * z)
        cleaned.append(denoised)
    return torch.cat(advanced), torch.cat(cleaned)


def _images(tensors: Sequence[Tensor], rows: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    return zip(*(one.split([*rows]) for one in tensors), strict=True)
