"""The layers of a DiT over packed rows; what they compute is diffusers'.

The weights are those of the diffusers modules that they are built from, taken over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_cluster.engine.adapters.deltas import RowDeltas
from ray_cluster.engine.batch.spans import Spans, image_lengths
from ray_cluster.engine.dit.active import Matrix
from ray_cluster.engine.dit.attention import Attend
from ray_cluster.engine.dit.packing import Packing
from ray_cluster.engine.dit.rotary import Rotary
from ray_cluster.engine.models.packed_weights import packed_gelu, packed_linear
from ray_cluster.engine.step.active import OtherTokens


@dataclass(frozen=True, slots=True)
class TokenDeltas:
    """Which rows of a ring's matrices have deltas.

    Attributes:
        rows: of those with one row per image.
        image: of the images' tokens.
        prompt: of the prompts' tokens.
        joint: of both.
    """

    rows: RowDeltas
    image: RowDeltas
    prompt: RowDeltas
    joint: RowDeltas

    @classmethod
    def of(cls, rows: RowDeltas | None, packing: Packing) -> TokenDeltas | None:
        """Find them, given which images have deltas."""
        if rows is None:
            return None
        matrices = (packing.image, packing.prompt, packing.joint)
        return cls(rows, *(rows.spread(image_lengths(spans)) for spans in matrices))


class Place(NamedTuple):
    """Where sequences lie in a matrix, and which of its rows have deltas."""

    spans: Spans
    deltas: RowDeltas | None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the blocks of a batch share.

    Attributes:
        embedding: ``[R, D]``, activated, of every image's timestep and pooled prompt.
        rotary: the positions of all joint rows, for models that turn queries and keys by them.
        key_rotary: of the joint rows that are attended to, likewise.
        others: what is attended to of tokens that are not in the matrices, and noted of those that
            are; None where there are none and nothing is noted.
        deltas: None where no image has any.
    """

    embedding: Tensor
    packing: Packing
    attend: Attend
    rotary: Rotary | None
    key_rotary: Rotary | None
    others: OtherTokens[Matrix] | None = None
    deltas: TokenDeltas | None = None

    @property
    def image(self) -> Place:
        """The matrix of images' tokens."""
        return Place(self.packing.image, None if self.deltas is None else self.deltas.image)

    @property
    def prompt(self) -> Place:
        """That of prompts' tokens."""
        return Place(self.packing.prompt, None if self.deltas is None else self.deltas.prompt)

    @property
    def joint(self) -> Place:
        """That of both."""
        return Place(self.packing.joint, None if self.deltas is None else self.deltas.joint)

    @property
    def row_deltas(self) -> RowDeltas | None:
        """Which rows of the embedding have deltas."""
        return None if self.deltas is None else self.deltas.rows

    def attend_jointly(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention over the joint rows, ``[J, heads, d]`` each, as ``[J, heads * d]``."""
        if self.others is not None:
            key, value = self.others.joined(key, "joint"), self.others.joined(value, "joint")
        if self.rotary is not None and self.key_rotary is not None:
            query, key = self.rotary(query), self.key_rotary(key)
        return self.attend(query, key, value, self.packing.joint, self.packing.attended.joint)

    def attend_images(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return likewise attention over the images' rows alone."""
        if self.others is not None:
            key, value = self.others.joined(key, "image"), self.others.joined(value, "image")
        return self.attend(query, key, value, self.packing.image, self.packing.attended.image)


def modulate(rows: Tensor, spans: Spans, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale each image's rows by its own; in place.

    Args:
        rows: ``[N, D]``.
        shift: ``[R, D]``, as is ``scale``, which counts from 1.
    """
    scale = scale + 1
    for span in spans:
        part = span.of(rows)
        own = (shift[span.images, None], part, scale[span.images, None])
        torch.addcmul(*own, out=part)
    return rows


def add_gated(rows: Tensor, spans: Spans, gate: Tensor, more: Tensor) -> Tensor:
    """Return rows plus others that are weighted by each image's gate, in place of the others."""
    for span in spans:
        part = span.of(more)
        torch.addcmul(span.of(rows), gate[span.images, None], part, out=part)
    return more


class Heads:
    """Takes queries, keys and values apart, and normalises the first two where the model does it.

    Args:
        attention: which has the number of heads.
        norms: of queries and keys, over a head's channels; None for models without.
    """

    def __init__(self, attention: Any, norms: Sequence[Any]) -> None:
        self._heads = attention.heads
        self._norms = tuple(norms)

    def __call__(self, projected: Tensor) -> list[Tensor]:
        """Return three ``[N, heads, d]`` of ``[N, 3 * D]``."""
        parts = list(projected.unflatten(1, (3, self._heads, -1)).unbind(1))
        for index, norm in enumerate(self._norms):
            if norm is not None:
                parts[index] = norm(parts[index])
        return parts


class Projections:
    """Queries, keys and values of rows: three ``[N, heads, d]`` of ``[N, D]``."""

    def __init__(self, layers: Sequence[Any], heads: Heads) -> None:
        self._layer = packed_linear(*layers)
        self._heads = heads

    def __call__(self, rows: Tensor, deltas: RowDeltas | None) -> list[Tensor]:
        """Return queries, keys and values."""
        return self._heads(self._layer(rows, deltas))


class FeedForward:
    """Two linear layers with a GELU between them."""

    def __init__(self, feed_forward: Any) -> None:
        first, _, second = feed_forward.net
        self._first, self._second = packed_gelu(first.proj, "tanh"), packed_linear(second)

    def __call__(self, rows: Tensor, deltas: RowDeltas | None) -> Tensor:
        return self._second(self._first(rows, deltas), deltas)


class LastNorm:
    """The modulated norm before a model's or a stream's last layer (``AdaLayerNormContinuous``)."""

    def __init__(self, norm: Any) -> None:
        self._norm, self._modulation = norm.norm, packed_linear(norm.linear)

    def __call__(self, rows: Tensor, spans: Spans, conditions: Conditions) -> Tensor:
        scale, shift = self._modulation(conditions.embedding, conditions.row_deltas).chunk(2, dim=1)
        return modulate(self._norm(rows), spans, shift, scale)
