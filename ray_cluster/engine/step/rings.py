"""Which rows of a batch run in which part of the model, and how they leave and come back.

The blocks of a model lie in rings around its middle (see ``policies/steps/reuse.py``). The rows of
a ring are a batch of their own, with a layout of their own; those that reuse leave the matrices on
the way in, all of their tokens or those that are not active, and what was kept of these comes back
on the way out. A batch without reuse has one ring, and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.batch.token_layout import Composition, SizeGroup, TokenLayout, layout_of
from ray_cluster.engine.step.executor import KeptRow, RowReuse, StepBatch
from ray_cluster.kernels.row_scatter.op import row_scatter
from ray_cluster.policies.steps.reuse import ReuseMap

_KEPT_RINGS = 512


@dataclass(frozen=True, slots=True)
class Ring:
    """The rows of a batch that run in some of a model's blocks.

    Attributes:
        layout: theirs, as if all were whole; without segments where there are none.
        requests: which requests of the batch they are, in its order.
        images: which of the batch's model rows, likewise.
        partial: those of them of which only the active tokens are in the matrices.
    """

    layout: TokenLayout
    requests: tuple[int, ...]
    images: tuple[int, ...]
    partial: frozenset[int] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether its blocks need not run."""
        return not self.requests

    def has_same(self, other: Ring) -> bool:
        """Whether its matrices have the same rows as those of another ring of the batch."""
        return self.images == other.images and self.partial == other.partial


@dataclass(frozen=True, slots=True)
class Rows:
    """What a kind of matrix has of every model row of a batch.

    Attributes:
        lengths: tokens of each.
        active: of those that are partial somewhere, which tokens are computed there, rising.
    """

    lengths: Sequence[int]
    active: Mapping[int, Tensor] = field(default_factory=dict)

    def counts(self, ring: Ring) -> list[int]:
        """Return how many tokens of each of its model rows the matrix of a ring has."""
        return [
            len(self.active[image]) if image in ring.partial else self.lengths[image]
            for image in ring.images
        ]

    def split(self, flat: Tensor, ring: Ring) -> dict[int, Tensor]:
        """Return a ring's matrix by model row, views."""
        return dict(zip(ring.images, flat.split(self.counts(ring)), strict=True))


class Rings:
    """The rings of a batch, from that of all rows, 0, to the middle of the model.

    Args:
        num_rings: of the model, beside ring 0.
    """

    def __init__(self, batch: StepBatch[Any], num_rings: int) -> None:
        self._batch = batch
        self._rings = [whole_ring(batch.layout)] * (num_rings + 1)
        # by model row, what is noted of its tokens in a full step, and taken over in a partial one
        self._noted: dict[int, list[Tensor]] = {}
        self._taken: dict[int, Iterator[Tensor]] = {}
        if any(row is not None and row.kept is not None for row in batch.reuse):
            reuse_map = ReuseMap(
                tuple(map(_num_outer, batch.reuse)),
                tuple(None if row is None else row.active for row in batch.reuse),
            )
            self._rings = [self._ring(reuse_map, depth) for depth in range(num_rings + 1)]
        for row, images in self._of():
            for image, kept in zip(images, row.kept or (), strict=False):
                self._taken[image] = iter(kept.tokens)
            if row.is_by_patch and row.kept is None:
                self._noted |= {image: [] for image in images}

    def _ring(self, reuse_map: ReuseMap, depth: int) -> Ring:
        composition, num_levels = self._batch.layout.composition, self._num_levels
        ring = _part(composition, reuse_map.is_active(depth), num_levels)
        is_partial = reuse_map.is_partial(depth)
        if not any(is_partial):
            return ring
        owners = self._batch.layout.row_request
        return replace(ring, partial=frozenset(i for i in ring.images if is_partial[owners[i]]))

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

    def narrow(self, flat: Tensor, depth: int, rows: Rows) -> Tensor:
        """Return the rows of a ring's matrix ``[N, C]`` that are in the next ring inwards too.

        Args:
            rows: what matrices of this kind have of every model row.
        """
        return self.select(flat, self._rings[depth], self._rings[depth + 1], rows)

    def select(self, flat: Tensor, outer: Ring, inner: Ring, rows: Rows) -> Tensor:
        """Return likewise the rows of one ring that are in another one further in."""
        if inner.has_same(outer):
            return flat
        parts = rows.split(flat, outer)
        cut = inner.partial - outer.partial
        parts |= {image: parts[image].index_select(0, rows.active[image]) for image in cut}
        return torch.cat([flat[:0], *(parts[image] for image in inner.images)])

    def widen(
        self, inside: Tensor, depth: int, rows: Rows, returning: Mapping[int, Tensor]
    ) -> Tensor:
        """Return a ring's matrix, from that of the next ring inwards and rows that come back.

        Args:
            returning: ``[n, C]`` by model row of the batch, for all that the inner ring lacks, in
                whole or in part; written to.
        """
        outer, inner = self._rings[depth], self._rings[depth + 1]
        if inner.has_same(outer):
            return inside
        parts = dict(returning)
        if not inner.is_empty:
            parts |= rows.split(inside, inner)
        for image in inner.partial - outer.partial:
            goal, packed = returning[image], parts[image].contiguous()
            parts[image] = row_scatter(goal, packed, rows.active[image], in_place=True)
        return torch.cat([parts[image] for image in outer.images])

    def kept(self, depth: int, stream: int = 0) -> dict[int, Tensor]:
        """Return what was kept of the rows that come back into a ring, by model row."""
        return {
            image: kept.made[stream]
            for row, images in self._of(depth)
            if row.kept is not None
            for image, kept in zip(images, row.kept, strict=True)
        }

    def taken(self, depth: int) -> dict[int, Iterator[Tensor]]:
        """Return what was kept of the tokens of a ring's partial rows, in the order of the asking.

        A row's iterator is the same at all depths.
        """
        partial = self._rings[depth].partial
        return {image: rest for image, rest in self._taken.items() if image in partial}

    def noted(self, depth: int) -> dict[int, list[Tensor]]:
        """Return the lists into which the blocks of a ring note what they ask of tokens."""
        within = {image for row, images in self._of() if row.num_outer < depth for image in images}
        return {image: notes for image, notes in self._noted.items() if image in within}

    def keep(self, depth: int, streams: Sequence[tuple[Tensor, Rows]]) -> None:
        """Keep what came from within a ring, of the rows that later steps will take it from.

        Args:
            streams: matrices of that ring, each with what its kind has of every model row.
        """
        keeping = [(row, images) for row, images in self._of(depth) if row.kept is None]
        if not keeping:
            return
        by_image = [rows.split(flat, self._rings[depth]) for flat, rows in streams]
        for row, images in keeping:
            # copies: views would keep all other rows of the matrix alive
            row.fresh = tuple(
                KeptRow(
                    tuple(parts[image].clone() for parts in by_image),
                    tuple(self._noted.get(image, ())),
                )
                for image in images
            )

    def _of(self, depth: int | None = None) -> Iterator[tuple[RowReuse, list[int]]]:
        """Find the rows that are cut, at any depth or at one, with their model rows."""
        for request, row in enumerate(self._batch.reuse):
            if row is not None and depth in (None, row.num_outer):
                owners = enumerate(self._batch.layout.row_request)
                yield row, [image for image, owner in owners if owner == request]


def _num_outer(row: RowReuse | None) -> int | None:
    return None if row is None or row.kept is None else row.num_outer


def whole_ring(layout: TokenLayout) -> Ring:
    """Return the ring of all requests of a layout."""
    requests, images = range(layout.num_requests), range(len(layout.row_request))
    return Ring(layout, tuple(requests), tuple(images))


def part_of(layout: TokenLayout, is_active: tuple[bool, ...]) -> Ring:
    """Return the ring of some requests of a layout."""
    return _part(layout.composition, is_active, len(layout.levels))


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
