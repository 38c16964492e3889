"""The blocks of a DiT: two streams with joint attention, or one stream of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.engine.dit.parts import (
    Conditions,
    FeedForward,
    Heads,
    LastNorm,
    Place,
    Projections,
    add_gated,
    modulate,
)
from ray_cluster.engine.models.packed_weights import packed_linear

# shift, scale and gate: of attention, of the feed-forward layer, of a second attention
_PARTS = 3


class JointBlock:
    """Images and prompts with layers of their own, but one attention over both.

    Args:
        block: diffusers' ``JointTransformerBlock`` (SD3), whose images may have a second attention
            among themselves (SD3.5) and whose last one drops the prompts, or
            ``FluxTransformerBlock``.
    """

    def __init__(self, block: Any) -> None:
        attention = block.attn
        heads = _own_projections(attention)
        second = getattr(block, "attn2", None)
        self._image = _Stream(
            heads,
            block.norm1,
            attention.to_out[0],
            (block.norm2, block.ff),
            None if second is None else _SelfAttention(second),
        )
        heads = Projections(
            (attention.add_q_proj, attention.add_k_proj, attention.add_v_proj),
            Heads(attention, (attention.norm_added_q, attention.norm_added_k)),
        )
        self._prompt: _Stream | _LastStream = (
            _LastStream(heads, block.norm1_context)
            if getattr(block, "context_pre_only", False)
            else _Stream(
                heads,
                block.norm1_context,
                attention.to_add_out,
                (block.norm2_context, block.ff_context),
            )
        )

    def __call__(
        self, image: Tensor, prompt: Tensor, conditions: Conditions
    ) -> tuple[Tensor, Tensor]:
        """Return the next images' and prompts' tokens, ``[N, D]`` and ``[P, D]``."""
        packing = conditions.packing
        images = self._image.begin(image, conditions.image, conditions)
        prompts = self._prompt.begin(prompt, conditions.prompt, conditions)
        query, key, value = map(packing.merge, prompts.heads, images.heads)
        attended = conditions.attend_jointly(query, key, value)
        own = packing.image_rows(attended)
        image = self._image.finish(image, conditions.image, images, own)
        if isinstance(self._prompt, _Stream):
            own = packing.prompt_rows(attended)
            prompt = self._prompt.finish(prompt, conditions.prompt, prompts, own)
        return image, prompt


@dataclass(frozen=True, slots=True)
class _Begun:
    """A stream of a joint block up to the joint attention.

    Attributes:
        heads: queries, keys and values.
        parts: ``[R, D]`` each, what its norms are shifted and scaled by, and its gates.
        more: what a second attention gives, before its gate.
    """

    heads: list[Tensor]
    parts: tuple[Tensor, ...] = ()
    more: Tensor | None = None


class _Stream:
    """The layers that images or prompts have of their own in a joint block.

    Args:
        norm: ``AdaLayerNormZero``, or ``SD35AdaLayerNormZeroX`` for a second attention.
        output: the projection after attention.
        tail: the norm and the feed-forward layer after that.
    """

    def __init__(
        self,
        heads: Projections,
        norm: Any,
        output: Any,
        tail: tuple[Any, Any],
        second: _SelfAttention | None = None,
    ) -> None:
        self._heads, self._second = heads, second
        self._num_parts = norm.linear.out_features // norm.linear.in_features
        self._norm, self._modulation = norm.norm, packed_linear(norm.linear)
        self._output = packed_linear(output)
        self._tail_norm, self._feed_forward = tail[0], FeedForward(tail[1])

    def begin(self, rows: Tensor, place: Place, conditions: Conditions) -> _Begun:
        """Compute what comes before the joint attention."""
        modulation = self._modulation(conditions.embedding, conditions.row_deltas)
        parts = modulation.chunk(self._num_parts, dim=1)
        normed, spans = self._norm(rows), place.spans
        more = None
        if self._second is not None:
            shift, scale, _ = parts[2 * _PARTS :]
            more = self._second(modulate(normed.clone(), spans, shift, scale), conditions)
        heads = self._heads(modulate(normed, spans, parts[0], parts[1]), place.deltas)
        return _Begun(heads, parts, more)

    def finish(self, rows: Tensor, place: Place, begun: _Begun, attended: Tensor) -> Tensor:
        """Return the rows after attention and feed-forward layer."""
        parts, (spans, deltas) = begun.parts, place
        rows = add_gated(rows, spans, parts[2], self._output(attended, deltas))
        if begun.more is not None:
            rows = add_gated(rows, spans, parts[-1], begun.more)
        shift, scale, gate = parts[_PARTS : 2 * _PARTS]
        normed = modulate(self._tail_norm(rows), spans, shift, scale)
        return add_gated(rows, spans, gate, self._feed_forward(normed, deltas))


class _LastStream:
    """The prompts in SD3's last block: they are attended to, and not needed any more."""

    def __init__(self, heads: Projections, norm: Any) -> None:
        self._heads, self._norm = heads, LastNorm(norm)

    def begin(self, rows: Tensor, place: Place, conditions: Conditions) -> _Begun:
        """Compute what comes before the joint attention."""
        return _Begun(self._heads(self._norm(rows, place.spans, conditions), place.deltas))


class _SelfAttention:
    """Attention of the images' tokens alone (SD3.5)."""

    def __init__(self, attention: Any) -> None:
        self._heads = _own_projections(attention)
        self._output = packed_linear(attention.to_out[0])

    def __call__(self, rows: Tensor, conditions: Conditions) -> Tensor:
        deltas = conditions.image.deltas
        return self._output(conditions.attend_images(*self._heads(rows, deltas)), deltas)


class SingleBlock:
    """Images and prompts as one stream: attention and feed-forward beside each other.

    Args:
        block: diffusers' ``FluxSingleTransformerBlock``.
    """

    def __init__(self, block: Any) -> None:
        attention = block.attn
        self._norm, self._modulation = block.norm.norm, packed_linear(block.norm.linear)
        self._width = attention.to_q.out_features
        self._input = packed_linear(attention.to_q, attention.to_k, attention.to_v, block.proj_mlp)
        self._heads = Heads(attention, (attention.norm_q, attention.norm_k))
        self._output = packed_linear(block.proj_out)

    def __call__(self, joint: Tensor, conditions: Conditions) -> Tensor:
        """Return the next tokens of both, ``[J, D]``."""
        spans, deltas = conditions.joint
        modulation = self._modulation(conditions.embedding, conditions.row_deltas)
        shift, scale, gate = modulation.chunk(_PARTS, dim=1)
        projected = self._input(modulate(self._norm(joint), spans, shift, scale), deltas)
        query, key, value = self._heads(projected[:, : 3 * self._width])
        attended = conditions.attend_jointly(query, key, value)
        fed = F.gelu(projected[:, 3 * self._width :], approximate="tanh")
        output = self._output(torch.cat([attended, fed], dim=1), deltas)
        return add_gated(joint, spans, gate, output)


def _own_projections(attention: Any) -> Projections:
    return Projections(
        (attention.to_q, attention.to_k, attention.to_v),
        Heads(attention, (attention.norm_q, attention.norm_k)),
    )
