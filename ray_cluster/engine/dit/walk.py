"""The blocks of a DiT, from both ends to the middle and back, over rows that leave and come back.

Ring ``k`` has the ``k``-th block from either end. Of what lies within it, the residual is reused:
what the inner blocks add to the tokens (Chen et al. 2024, Delta-DiT, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ray_cluster.engine.dit.active import TokenRows
from ray_cluster.engine.dit.models import LeanDiT
from ray_cluster.engine.dit.packing import Parted, Streams
from ray_cluster.engine.dit.parts import Conditions
from ray_cluster.engine.step.rings import Rings, Rows


@dataclass(frozen=True, slots=True)
class Walk:
    """One pass through the blocks.

    Attributes:
        conditions: of every ring, from that of all rows inwards.
        tokens: of all model rows.
    """

    lean: LeanDiT
    rings: Rings
    conditions: Sequence[Conditions]
    tokens: TokenRows

    def run(self, streams: Streams) -> Tensor:
        """Run all blocks; return the images' tokens ``[N, D]`` of all rows."""
        return self._within(0, streams).parted(self.conditions[0].packing).image

    def _within(self, depth: int, streams: Streams) -> Streams:
        """Run what lies within a ring, over the rows of that ring."""
        if depth == num_rings(self.lean):
            return streams
        if not self.rings.is_cut(depth):
            return self._ring(depth + 1, streams)
        before = streams.parted(self.conditions[depth].packing)
        inside = Parted(*map(self._narrow, [depth] * 2, before, self._rows))
        if not self.rings[depth + 1].is_empty:
            packing = self.conditions[depth + 1].packing
            inside = self._ring(depth + 1, inside).parted(packing)
        # after the last block the prompts' tokens are not needed
        used = range(1 if depth == 0 else 2)
        after = [self._widen(depth, stream, inside[stream], before[stream]) for stream in used]
        made = [(after[stream] - before[stream], self._rows[stream]) for stream in used]
        self.rings.keep(depth, made)
        return Parted(after[0], after[-1] if depth else before.prompt)

    def _ring(self, depth: int, streams: Streams) -> Streams:
        """Run a ring and what lies within it."""
        first, last = depth - 1, self.lean.num_blocks - depth
        streams = self.lean.run(first, streams, self.conditions[depth])
        if first == last:
            return streams
        return self.lean.run(last, self._within(depth, streams), self.conditions[depth])

    @property
    def _rows(self) -> tuple[Rows, Rows]:
        """What the images' matrix and the prompts' have of every model row."""
        return self.tokens.image, self.tokens.prompt

    def _narrow(self, depth: int, flat: Tensor, rows: Rows) -> Tensor:
        return self.rings.narrow(flat, depth, rows)

    def _widen(self, depth: int, stream: int, inside: Tensor, before: Tensor) -> Tensor:
        """Return the rows of a ring, those that reuse with what was kept added to them."""
        kept, rows = self.rings.kept(depth, stream), self._rows[stream]
        if not kept:
            return inside
        own = rows.split(before, self.rings[depth])
        returning = {image: own[image] + more for image, more in kept.items()}
        return self.rings.widen(inside, depth, rows, returning)


def num_rings(lean: LeanDiT) -> int:
    """Return how many rings the blocks of a model make."""
    return -(-lean.num_blocks // 2)
