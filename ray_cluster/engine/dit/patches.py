"""From rows of pixels to rows of patches and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ray_cluster.engine.batch.token_layout import Level


def to_patches(pixels: Tensor, level: Level, patch: int) -> Tensor:
    """Return ``[N, C]`` as ``[N / patch**2, C * patch**2]``, channels first (as FLUX has them).

    Args:
        level: where the patches lie.
        patch: pixels along a side.
    """
    parts = []
    for segment in level.segments:
        rows = pixels[segment.tokens.start * patch**2 : segment.tokens.stop * patch**2]
        shape = (segment.num_images, segment.height, patch, segment.width, patch, -1)
        parts.append(
            rows.view(shape)
            .permute(0, 1, 3, 5, 2, 4)
            .reshape(segment.tokens.stop - segment.tokens.start, -1)
        )
    return _joined(parts)


def from_channels_first(patches: Tensor, level: Level, patch: int) -> Tensor:
    """Return what :func:`to_patches` was given."""
    return _restore(patches, level, (-1, patch, patch), (0, 1, 4, 2, 5, 3))


def from_channels_last(patches: Tensor, level: Level, patch: int) -> Tensor:
    """Return likewise the pixels of patches that have their channels last (as SD3's output)."""
    return _restore(patches, level, (patch, patch, -1), (0, 1, 3, 2, 4, 5))


def _restore(
    patches: Tensor, level: Level, inner: tuple[int, int, int], order: tuple[int, ...]
) -> Tensor:
    parts = []
    for segment in level.segments:
        shape = (segment.num_images, segment.height, segment.width, *inner)
        images = patches[segment.tokens].view(shape).permute(order)
        parts.append(images.reshape(-1, images.shape[-1]))
    return _joined(parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
