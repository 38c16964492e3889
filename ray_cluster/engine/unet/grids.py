"""Where the pixels of a ring's rows lie at one level of a UNet, and what is around them.

Of partial rows only the active patches' pixels are in the matrix. A layer that looks at other
pixels is given those as they were in the row's last full step: group norms see the whole image, and
convolutions run over the patches alone, each with what is around it. (After PatchedServe,
sections 4 and 5.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.adapters.deltas import RowDeltas
from ray_cluster.engine.batch.spans import Span, Spans, divided, spans_of
from ray_cluster.engine.batch.token_layout import Level, Segment
from ray_cluster.engine.models.packed_weights import Convolution
from ray_cluster.engine.step.active import OtherTokens, image_rows
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.model_rows import KeptDeltas
from ray_cluster.engine.step.rings import Rings, Rows
from ray_cluster.engine.unet.halo import HaloPlan, PlacedImage, Reach, Size, plan_of
from ray_cluster.kernels.row_gather.op import row_gather
from ray_cluster.policies.steps.reuse import ActivePatches


@dataclass(frozen=True, slots=True)
class Move:
    """How a convolution goes to another level.

    Attributes:
        target: the grid of that level.
        reach: what it takes its pixels from.
        inputs_of: what is done with whole images ``[n, C, h, w]`` before it, given the size of what
            it makes of them.
    """

    target: Grid
    reach: Reach
    inputs_of: Callable[[Tensor, Size], Tensor]


class Grid:
    """The pixels of images that are all whole, and of which nothing is noted.

    Args:
        level: where they lie.
        rounds: whether matrices of several sizes have rows to spare, so that there are few numbers
            of rows; see :func:`rounded_rows`.
        deltas: of the images; None where they have none.

    Attributes:
        level: where they lie.
        deltas: of the matrix's rows.
        spans: the same, as sequences.
        key_spans: where the pixels lie that these attend to, span by span.
    """

    def __init__(
        self, level: Level, deltas: RowDeltas | None = None, *, rounds: bool = False
    ) -> None:
        self.level = level
        self._of_images = deltas
        self.deltas = deltas and deltas.spread(level.image_tokens)
        self._num_spare = 0
        if rounds and len(level.segments) > 1:
            self._num_spare = rounded_rows(level.num_tokens) - level.num_tokens
        self.spans: Spans = tuple(
            Span(segment.images, segment.tokens, segment.height * segment.width)
            for segment in level.segments
        )
        self.key_spans = self.spans

    def deltas_in(self, segment: Segment) -> RowDeltas | None:
        """Return the deltas of the images of a segment."""
        return self._of_images and self._of_images.within(segment.images)

    def stacked(self, parts: Sequence[Tensor]) -> Tensor:
        """Return matrices ``[n, C]`` of all pixels, one after the other, as one of them."""
        if not self._num_spare:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        spare = parts[0].new_zeros(self._num_spare, parts[0].shape[1])
        return torch.cat([*parts, spare])

    def joined(self, flat: Tensor) -> Tensor:
        """Return a matrix of these pixels, with those beside them that are not computed."""
        return flat

    def own(self, every: Tensor) -> Tensor:
        """Return of a matrix of all pixels those that are computed."""
        return every

    def convolved(
        self, every: Tensor, convolution: Convolution, move: Move | None = None
    ) -> Tensor:
        """Return a convolution of a matrix of all pixels, of those that are computed.

        Args:
            move: where its results lie, if that is another level.
        """
        target = self if move is None else move.target
        made = [
            convolution(_inputs(one, other, every, move), self.deltas_in(one))
            for one, other in self._pairs(target)
        ]
        return target.stacked([as_rows(images) for images in made])

    def _pairs(self, target: Grid) -> Iterator[tuple[Segment, Segment]]:
        """Return the segments of this level, each with that of the same images in another grid."""
        return zip(self.level.segments, target.level.segments, strict=True)


class PatchGrid(Grid):
    """The pixels of images some of which are partial, or of which something is noted.

    Args:
        number: of the level.
        level: where the pixels would lie if all were whole.
        rows: what the level's matrix has of every model row.
        active: patches of the ring's partial rows, by model row of the batch.
        others: pixels that are not computed.
        deltas: of the images.
    """

    def __init__(
        self,
        number: int,
        level: Level,
        rows: Rows,
        active: Mapping[int, ActivePatches],
        others: OtherTokens[int],
        deltas: RowDeltas | None = None,
    ) -> None:
        super().__init__(level, deltas)
        self._number, self._others = number, others
        sizes = [_size(one) for one in level.segments for _ in range(one.num_images)]
        firsts = accumulate((size.height * size.width for size in sizes), initial=0)
        self._images = [
            PlacedImage(size, first, active.get(image))
            for image, size, first in zip(others.ring.images, sizes, firsts, strict=False)
        ]
        self._counts = rows.counts(others.ring)
        self.deltas = deltas and deltas.spread(self._counts)
        divisions = list(divided([one.images for one in level.segments], self._counts))
        runs = [run for _, run in divisions]
        lengths = [self.spans[index].length for index, _ in divisions]
        self.spans = spans_of(runs, [self._counts[run.start] for run in runs])
        self.key_spans = spans_of(runs, lengths)
        self._owner: Tensor | None = None
        self._plans: dict[Reach, HaloPlan] = {}

    def joined(self, flat: Tensor) -> Tensor:
        """Return a matrix of these pixels, with those beside them that are not computed."""
        return self._others.joined(flat, self._number)

    def own(self, every: Tensor) -> Tensor:
        """Return of a matrix of all pixels those that are computed."""
        if not self._others.ring.partial:
            return every
        return row_gather(every, self._others.places(self._number, every.device))

    def per_row(self, per_image: Tensor) -> Tensor:
        """Return what ``[R, C]`` is of each image for each of its rows, ``[n, C]``."""
        if self._owner is None:
            counts = torch.tensor(self._counts, device=per_image.device)
            owners = torch.arange(len(counts), device=per_image.device)
            self._owner = owners.repeat_interleave(counts, output_size=sum(self._counts))
        return per_image[self._owner]

    def convolved(
        self, every: Tensor, convolution: Convolution, move: Move | None = None
    ) -> Tensor:
        """Return a convolution of a matrix of all pixels, of those that are computed."""
        if not self._others.ring.partial:
            return super().convolved(every, convolution, move)
        plan, made = self._plan(move, every.device), []
        parts = row_gather(every, plan.source).split([piece.num_rows for piece in plan.pieces])
        for piece, part in zip(plan.pieces, parts, strict=True):
            images = part.view(-1, *piece.size, part.shape[1]).permute(0, 3, 1, 2)
            if piece.target is None:
                made.append(convolution.unpadded(images))
            else:
                inputs = images if move is None else move.inputs_of(images, piece.target)
                made.append(convolution(inputs))
        found = row_gather(torch.cat([as_rows(images) for images in made]), plan.order)
        [own] = convolution.owned
        if self._of_images is not None and any(self._of_images.of_layer(own.layer)):
            self._add(found, every, convolution, move)
        return found

    def _add(
        self, found: Tensor, every: Tensor, convolution: Convolution, move: Move | None
    ) -> None:
        """Add deltas to a convolution: they see whole images, of which some pixels are computed."""
        target = self if move is None else move.target
        more = found.new_zeros(target.level.num_tokens, found.shape[1])
        for one, other in self._pairs(target):
            if (deltas := self.deltas_in(one)) is not None:
                inputs = _inputs(one, other, every, move)
                deltas.add(convolution.owned, inputs, other.as_images(more))
        found += target.own(more)

    def _plan(self, move: Move | None, device: torch.device) -> HaloPlan:
        reach = Reach() if move is None else move.reach
        if reach not in self._plans:
            goal = self if move is None else move.target
            assert isinstance(goal, PatchGrid), "all levels of a ring have the same rows"
            plan = plan_of(self._images, goal._images, self._number, reach)
            self._plans[reach] = HaloPlan(
                plan.source.to(device), plan.pieces, plan.order.to(device)
            )
        return self._plans[reach]


def level_rows(batch: StepBatch[Any]) -> list[Rows]:
    """Return what the matrix of every level has of every model row of a batch."""
    return [image_rows(batch, number, 2**number) for number in range(len(batch.layout.levels))]


def grids_of(
    batch: StepBatch[Any],
    rings: Rings,
    depth: int,
    rows: Sequence[Rows],
    kept: KeptDeltas,
    *,
    rounds: bool = False,
) -> tuple[Grid, ...]:
    """Return the grids of all levels of a ring.

    Args:
        rows: what each level's matrix has of every model row.
        kept: the executor's.
        rounds: see :class:`Grid`; not where rows reuse, whose rings differ from each other.
    """
    ring, owners = rings[depth], batch.layout.row_request
    deltas = kept.of(batch, ring)
    others = OtherTokens.of(rings, depth, dict(enumerate(rows)))
    if others is None:
        rounds = rounds and not batch.reuse
        return tuple(Grid(level, deltas, rounds=rounds) for level in ring.layout.levels)
    active: dict[int, ActivePatches] = {}
    for image in ring.partial:
        part = batch.reuse[owners[image]]
        assert part is not None, "a partial row reuses"
        assert part.active is not None, "a partial row has active patches"
        active[image] = part.active
    return tuple(
        PatchGrid(number, level, rows[number], active, others, deltas)
        for number, level in enumerate(ring.layout.levels)
    )


def rounded_rows(count: int) -> int:
    """Return the next of few numbers of rows: eight between each power of two and the next.

    On a CPU a linear layer over another number of rows is another kernel, made when it is first
    called. For the layers of a small model that takes longer than a step, and half a megabyte each.
    """
    unit: int = 2 ** max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


def as_rows(images: Tensor) -> Tensor:
    """Return ``[n, C, h, w]`` as ``[n * h * w, C]``; a view if it is in channels-last order."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


def _inputs(segment: Segment, goal: Segment, every: Tensor, move: Move | None) -> Tensor:
    """Return what the images of a segment are convolved as."""
    images = segment.as_images(every)
    return images if move is None else move.inputs_of(images, _size(goal))


def _size(segment: Segment) -> Size:
    return Size(segment.height, segment.width)
