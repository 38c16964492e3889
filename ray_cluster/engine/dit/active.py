"""Which tokens of a batch are computed, and what is attended to of those that are not.

A row that recomputes some of its patches (see ``policies/reuse.py``) has only their tokens in the
matrices of the inner rings. They attend to all tokens of their image and its prompt: to the keys
and values that the others had in the row's last full step. Everything else that a transformer does
with tokens looks at each alone. (InstGenIE, section 3.1, masks attention alike.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from ray_cluster.engine.executor import StepBatch
from ray_cluster.engine.rings import Ring, Rings, Rows
from ray_cluster.kernels.row_gather.op import row_gather
from ray_cluster.policies.reuse import ActivePatches

Matrix = Literal["image", "joint"]

_KEPT_INDICES = 512


@dataclass(frozen=True, slots=True)
class TokenRows:
    """What the matrices of tokens have of every model row of a batch.

    Attributes:
        image: the matrix of images' tokens.
        prompt: that of prompts' tokens.
        joint: that of both, each image's before its prompt's.
    """

    image: Rows
    prompt: Rows
    joint: Rows

    @classmethod
    def of(cls, batch: StepBatch[Any], num_prompt: int, shrink: int) -> TokenRows:
        """Find them.

        Args:
            num_prompt: tokens of each prompt.
            shrink: pixels of the latents along a side of a token.
        """
        images = batch.layout.levels[-1].image_tokens
        device = batch.latents.device
        image: dict[int, Tensor] = {}
        prompt: dict[int, Tensor] = {}
        joint: dict[int, Tensor] = {}
        sizes = [
            (segment.height, segment.width)
            for segment in batch.layout.levels[-1].segments
            for _ in range(segment.num_images)
        ]
        for row, request in enumerate(batch.layout.row_request if batch.reuse else ()):
            part = batch.reuse[request]
            if part is None or part.active is None:
                continue
            image[row] = active_tokens(part.active, *sizes[row], shrink).to(device)
            prompt[row] = torch.arange(num_prompt * part.active.has_prompt, device=device)
            joint[row] = torch.cat([image[row], prompt[row] + images[row]])
        return cls(
            Rows(images, image),
            Rows([num_prompt] * len(images), prompt),
            Rows([num_prompt + length for length in images], joint),
        )

    def counts(self, ring: Ring) -> list[tuple[int, int]]:
        """Return per model row of a ring how many tokens of the image and of the prompt it has."""
        return list(zip(self.image.counts(ring), self.prompt.counts(ring), strict=True))


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


class OtherTokens:
    """Adds to a ring's keys and values those of tokens that are not computed.

    Of rows that are computed whole and keep what was asked of their tokens, it notes that.
    """

    def __init__(
        self,
        ring: Ring,
        rows: Mapping[Matrix, Rows],
        taken: Mapping[int, Iterator[Tensor]],
        noted: Mapping[int, list[Tensor]],
    ) -> None:
        self._ring, self._rows = ring, rows
        self._taken, self._noted = taken, noted
        self._sources: dict[Matrix, Tensor] = {}

    @classmethod
    def of(cls, rings: Rings, depth: int, tokens: TokenRows) -> OtherTokens | None:
        """Return that of a ring; None where nothing is added or noted."""
        taken, noted = rings.taken(depth), rings.noted(depth)
        if not taken and not noted:
            return None
        rows: dict[Matrix, Rows] = {"image": tokens.image, "joint": tokens.joint}
        return cls(rings[depth], rows, taken, noted)

    def joined(self, flat: Tensor, matrix: Matrix) -> Tensor:
        """Return what ``[n, ...]`` is of the tokens in a matrix for all tokens, ``[N, ...]``."""
        if self._noted:
            parts = self._rows[matrix].split(flat, self._ring)
            for image, notes in self._noted.items():
                notes.append(parts[image].clone())
        if not self._ring.partial:
            return flat
        kept = [next(self._taken[image]) for image in self._ring.images if image in self._taken]
        both = torch.cat([flat, *kept]).flatten(1)
        return row_gather(both, self._source(matrix, flat.device)).view(-1, *flat.shape[1:])

    def places(self, matrix: Matrix, device: torch.device) -> Tensor:
        """Return where the tokens in a matrix are among all tokens."""
        rows, ring, parts = self._rows[matrix], self._ring, []
        starts = accumulate((rows.lengths[image] for image in ring.images), initial=0)
        for image, first in zip(ring.images, starts, strict=False):
            whole = torch.arange(rows.lengths[image], device=device)
            parts.append((rows.active[image] if image in ring.partial else whole) + first)
        return torch.cat(parts)

    def _source(self, matrix: Matrix, device: torch.device) -> Tensor:
        """Return for every token where it is among those in the matrix, and then the kept ones."""
        if matrix not in self._sources:
            rows, ring, parts = self._rows[matrix], self._ring, []
            places = self.places(matrix, device)
            kept = len(places)
            for image in ring.images:
                parts.append(torch.arange(kept, kept + rows.lengths[image], device=device))
                kept += rows.lengths[image] * (image in ring.partial)
            source = torch.cat(parts)
            source[places] = torch.arange(len(places), device=device)
            self._sources[matrix] = source
        return self._sources[matrix]
