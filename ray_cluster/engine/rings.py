"""Which rows of a batch run in which part of the model, and how they leave and come back.

The blocks of a model lie in rings around its middle (see ``policies/reuse.py``). The rows of a ring
are a batch of their own, with a layout of their own; those that reuse leave the matrices on the way
in, and what was kept of them comes back on the way out. A batch in which nobody reuses has one
ring, and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.executor import RowReuse, StepBatch
from ray_cluster.engine.token_layout import Composition, SizeGroup, TokenLayout, layout_of
from ray_cluster.policies.reuse import ReuseMap

_KEPT_RINGS = 512


@dataclass(frozen=True, slots=True)
class Ring:
    """The rows of a batch that run in some of a model's blocks.

    Attributes:
        layout: theirs; without segments where there are none.
        requests: which requests of the batch they are, in its order.
        images: which of the batch's model rows, likewise.
    """

    layout: TokenLayout
    requests: tuple[int, ...]
    images: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether its blocks need not run."""
        return not self.requests


class Rings:
    """The rings of a batch, from that of all rows, 0, to the middle of the model.

    Args:
        num_rings: of the model, beside ring 0.
    """

    def __init__(self, batch: StepBatch[Any], num_rings: int) -> None:
        self._batch = batch
        self._rings = [_whole(batch.layout)] * (num_rings + 1)
        if any(row is not None and row.kept is not None for row in batch.reuse):
            reuse_map = ReuseMap(tuple(map(_num_outer, batch.reuse)))
            self._rings = [
                _part(batch.layout.composition, reuse_map.is_active(depth), self._num_levels)
                for depth in range(num_rings + 1)
            ]

    @property
    def _num_levels(self) -> int:
        return len(self._batch.layout.levels)

    def __getitem__(self, depth: int) -> Ring:
        return self._rings[depth]

    def is_whole(self, depth: int) -> bool:
        """Whether all rows run in a ring."""
        return len(self._rings[depth].requests) == self._batch.layout.num_requests

    def is_cut(self, depth: int) -> bool:
        """Whether what lies within a ring is kept of some row, or was."""
        return any(row is not None and row.num_outer == depth for row in self._batch.reuse)

    def narrow(self, flat: Tensor, depth: int, lengths: Sequence[int]) -> Tensor:
        """Return the rows of a ring's matrix ``[N, C]`` that are in the next ring inwards too.

        Args:
            lengths: tokens of every model row of the batch in matrices of this kind.
        """
        return self.select(flat, self._rings[depth], self._rings[depth + 1], lengths)

    def select(self, flat: Tensor, outer: Ring, inner: Ring, lengths: Sequence[int]) -> Tensor:
        """Return likewise the rows of one ring that are in another one further in."""
        if inner.images == outer.images:
            return flat
        parts = dict(zip(outer.images, _split(flat, outer, lengths), strict=True))
        return torch.cat([flat[:0], *(parts[image] for image in inner.images)])

    def widen(
        self, inside: Tensor, depth: int, lengths: Sequence[int], returning: Mapping[int, Tensor]
    ) -> Tensor:
        """Return a ring's matrix, from that of the next ring inwards and rows that come back.

        Args:
            returning: ``[n, C]`` by model row of the batch, for all that the inner ring lacks.
        """
        outer, inner = self._rings[depth], self._rings[depth + 1]
        if inner.images == outer.images:
            return inside
        parts = dict(returning)
        if not inner.is_empty:
            parts |= zip(inner.images, _split(inside, inner, lengths), strict=True)
        return torch.cat([parts[image] for image in outer.images])

    def kept(self, depth: int, stream: int = 0) -> dict[int, Tensor]:
        """Return what was kept of the rows that come back into a ring, by model row."""
        return {
            image: rows[stream]
            for row, images in self._of(depth)
            if row.kept is not None
            for image, rows in zip(images, row.kept, strict=True)
        }

    def keep(self, depth: int, streams: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Keep what came from within a ring, of the rows that later steps will take it from.

        Args:
            streams: matrices of that ring, each with the tokens of every model row in it.
        """
        keeping = [(row, images) for row, images in self._of(depth) if row.kept is None]
        if not keeping:
            return
        ring = self._rings[depth]
        by_image = [
            dict(zip(ring.images, _split(flat, ring, lengths), strict=True))
            for flat, lengths in streams
        ]
        for row, images in keeping:
            # copies: views would keep all other rows of the matrix alive
            row.fresh = tuple(tuple(parts[image].clone() for parts in by_image) for image in images)

    def _of(self, depth: int) -> Iterator[tuple[RowReuse, list[int]]]:
        """Find the rows that are cut at a depth, with their model rows."""
        for request, row in enumerate(self._batch.reuse):
            if row is not None and row.num_outer == depth:
                owners = enumerate(self._batch.layout.row_request)
                yield row, [image for image, owner in owners if owner == request]


def _num_outer(row: RowReuse | None) -> int | None:
    return None if row is None or row.kept is None else row.num_outer


def _split(flat: Tensor, ring: Ring, lengths: Sequence[int]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = flat.split([lengths[image] for image in ring.images])
    return parts


def _whole(layout: TokenLayout) -> Ring:
    requests, images = range(layout.num_requests), range(len(layout.row_request))
    return Ring(layout, tuple(requests), tuple(images))


@lru_cache(maxsize=_KEPT_RINGS)
def _part(composition: Composition, is_active: tuple[bool, ...], num_levels: int) -> Ring:
    layout = layout_of(composition, num_levels)
    requests = tuple(request for request, active in enumerate(is_active) if active)
    owners = enumerate(layout.row_request)
    images = tuple(image for image, owner in owners if is_active[owner])
    return Ring(layout_of(_groups(composition, is_active), num_levels), requests, images)


def _groups(composition: Composition, is_active: Sequence[bool]) -> Composition:
    """Return the composition of the requests that are active, in the same order."""
    ends = [0, *accumulate(group.num_requests for group in composition)]
    groups = []
    for group, first in zip(composition, ends, strict=False):
        guided = sum(is_active[first : first + group.num_guided])
        plain = sum(is_active[first + group.num_guided : first + group.num_requests])
        if guided + plain:
            groups.append(SizeGroup(group.height, group.width, guided, plain))
    return tuple(groups)
