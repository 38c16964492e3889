"""Which tokens of a batch are computed, and what is asked of those that are not.

A row that recomputes some of its patches (see ``policies/steps/reuse.py``) has only their tokens in
the matrices of the inner rings. Where a layer looks beyond a token's own row (attention at keys and
values, a convolution at neighbours, a group norm at the whole image), it is given the other tokens
as they were in the row's last full step. (InstGenIE, section 3.1, masks attention alike.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.rings import Ring, Rings, Rows
from ray_cluster.kernels.row_scatter.op import row_scatter
from ray_cluster.policies.steps.reuse import ActivePatches

MatrixT = TypeVar("MatrixT")
"""Names a kind of matrix: which tokens it has."""

_KEPT_INDICES = 512


def image_rows(batch: StepBatch[Any], number: int, shrink: int) -> Rows:
    """Return what a matrix of images' tokens has of every model row of a batch.

    Args:
        number: of the level of the layout that has a row for every token.
        shrink: pixels of the latents along a side of a token.
    """
    level, active = batch.layout.levels[number], {}
    owners = batch.layout.row_request if batch.reuse else ()
    for segment in level.segments:
        for row, request in enumerate(owners[segment.images], start=segment.images.start):
            part = batch.reuse[request]
            if part is not None and part.active is not None:
                tokens = active_tokens(part.active, segment.height, segment.width, shrink)
                active[row] = tokens.to(batch.latents.device)
    return Rows(level.image_tokens, active)


@lru_cache(maxsize=_KEPT_INDICES)
def active_tokens(active: ActivePatches, height: int, width: int, shrink: int) -> Tensor:
    """Return which tokens of an image ``[height, width]`` are in active patches, rising.

    Raises:
        ValueError: these are the patches of another size of image.
    """
    side = active.patch_size // shrink
    patches = (-(-height // side), -(-width // side))
    if len(active.is_active) != patches[0] * patches[1]:
        raise ValueError(
            f"an image of {height} x {width} tokens has {patches[0]} x {patches[1]} patches, "
            f"given {len(active.is_active)}"
        )
    grid = torch.tensor(active.is_active).view(patches)
    tokens = grid.repeat_interleave(side, 0).repeat_interleave(side, 1)[:height, :width]
    return tokens.flatten().nonzero().flatten()


class OtherTokens(Generic[MatrixT]):
    """Adds to what a ring's layers ask of tokens that of the tokens that are not computed.

    Of rows that are computed whole and keep what was asked of their tokens, it notes that.
    """

    def __init__(
        self,
        ring: Ring,
        rows: Mapping[MatrixT, Rows],
        taken: Mapping[int, Iterator[Tensor]],
        noted: Mapping[int, list[Tensor]],
    ) -> None:
        self.ring = ring
        self._rows = rows
        self._taken, self._noted = taken, noted
        self._places: dict[MatrixT, Tensor] = {}

    @classmethod
    def of(
        cls, rings: Rings, depth: int, rows: Mapping[MatrixT, Rows]
    ) -> OtherTokens[MatrixT] | None:
        """Return that of a ring; None where nothing is added or noted.

        Args:
            rows: what each kind of matrix has of every model row.
        """
        taken, noted = rings.taken(depth), rings.noted(depth)
        if not taken and not noted:
            return None
        return cls(rings[depth], rows, taken, noted)

    def joined(self, flat: Tensor, matrix: MatrixT) -> Tensor:
        """Return what ``[n, ...]`` is of the tokens in a matrix for all tokens, ``[N, ...]``."""
        ring = self.ring
        is_split = bool(self._noted) or len(ring.partial) < len(ring.images)
        parts = self._rows[matrix].split(flat, ring) if is_split else {}
        for image, notes in self._noted.items():
            notes.append(parts[image].clone())
        if not ring.partial:
            return flat
        kept = [next(self._taken[i]) if i in ring.partial else parts[i] for i in ring.images]
        # a copy, into which the tokens of the matrix are written
        every = torch.cat(kept).flatten(1)
        own = flat.flatten(1).contiguous()
        row_scatter(every, own, self.places(matrix, flat.device), in_place=True)
        return every.view(-1, *flat.shape[1:])

    def places(self, matrix: MatrixT, device: torch.device) -> Tensor:
        """Return where the tokens in a matrix are among all tokens."""
        if matrix not in self._places:
            rows, ring, parts = self._rows[matrix], self.ring, []
            starts = accumulate((rows.lengths[image] for image in ring.images), initial=0)
            for image, first in zip(ring.images, starts, strict=False):
                whole = torch.arange(rows.lengths[image], device=device)
                parts.append((rows.active[image] if image in ring.partial else whole) + first)
            self._places[matrix] = torch.cat(parts)
        return self._places[matrix]
