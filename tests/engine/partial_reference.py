"""A partial step in diffusers' own transformer: hooks put kept values in the place of fresh ones.

All tokens go through all layers, and those that are not active are made to seem what they were:
the other tokens see their keys and values of an earlier call, and what the inner blocks add to them
is what these added then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.step.state import Conditioning
from tests.engine.dits import DiTReference
from tests.engine.two_steps import SCALE, StepRow, timestep_of

_OF_IMAGES, _OF_PROMPTS = ("to_k", "to_v"), ("add_k_proj", "add_v_proj")


class PartialReference:
    """One model row of a request in two calls.

    Args:
        cut: blocks at either end that are computed whole.
        is_active: per token of the image.
        has_prompt: whether the prompt's tokens are active.
        sees_kept: whether the tokens' keys and values are the kept ones; a control without.
    """

    def __init__(
        self,
        reference: DiTReference,
        cut: int,
        is_active: Tensor,
        *,
        has_prompt: bool,
        sees_kept: bool = True,
    ) -> None:
        self._reference, self._sees_kept = reference, sees_kept
        transformer = reference.pipeline.transformer
        blocks = [*transformer.transformer_blocks]
        self._single = list(getattr(transformer, "single_transformer_blocks", ()))
        blocks += self._single
        self._inner = blocks[cut : len(blocks) - cut]
        self._image, self._has_prompt = is_active, has_prompt
        self._kept: dict[Any, Tensor] = {}
        self._before: tuple[Tensor, Tensor] | None = None

    def predict(
        self, row: StepRow, embeds: tuple[Tensor, Tensor], *, is_first: bool = False
    ) -> Tensor:
        step = 0 if is_first else 1
        self._is_first = is_first
        with self._hooked(), torch.inference_mode():
            time = torch.tensor(timestep_of(step))
            return self._reference.predict(row.latents[step], time, embeds, SCALE)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = []
        for block in self._inner:
            for attention in (block.attn, getattr(block, "attn2", None)):
                for name in (*_OF_IMAGES, *_OF_PROMPTS):
                    layer = getattr(attention, name, None)
                    if layer is not None and self._sees_kept:
                        kind = "prompt" if name in _OF_PROMPTS else "image"
                        kind = "joint" if block in self._single else kind
                        handles.append(layer.register_forward_hook(self._mixing(kind)))
        first, last = self._inner[0], self._inner[-1]
        handles.append(first.register_forward_pre_hook(self._note_input, with_kwargs=True))
        handles.append(last.register_forward_hook(self._restore_output))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask(self, kind: str, num_tokens: int) -> Tensor:
        if kind == "image":
            return self._image
        prompt = torch.full((num_tokens - len(self._image) * (kind == "joint"),), self._has_prompt)
        # diffusers' FLUX has the prompt first
        return prompt if kind == "prompt" else torch.cat([prompt, self._image])

    def _mixed(self, key: Any, fresh: Tensor, kind: str) -> Tensor:
        if self._is_first:
            self._kept[key] = fresh.clone()
            return fresh
        mask = self._mask(kind, fresh.shape[1])[None, :, None]
        return torch.where(mask, fresh, self._kept[key])

    def _mixing(self, kind: str) -> Any:
        return lambda layer, _inputs, output: self._mixed(layer, output, kind)

    def _note_input(self, _block: Any, _args: Any, kwargs: Any) -> None:
        self._before = (kwargs["encoder_hidden_states"], kwargs["hidden_states"])

    def _restore_output(self, _block: Any, _inputs: Any, output: Any) -> Any:
        assert self._before is not None
        after = []
        for kind, before, one in zip(("prompt", "image"), self._before, output, strict=True):
            # SD3's last block has no prompts behind it
            after.append(None if one is None else before + self._mixed(kind, one - before, kind))
        return tuple(after)


def expected(
    reference: DiTReference, row: StepRow, owned: Conditioning, is_active: Tensor, **changes: Any
) -> Tensor:
    """What a partial step predicts for a request, ``[C, h, w]``, guided."""
    assert row.cut is not None
    assert row.active is not None
    found = []
    pairs: list[Any] = [(owned.prompt_embeds, owned.pooled_embeds)]
    if owned.is_guided:
        pairs.append((owned.negative_embeds, owned.negative_pooled_embeds))
    for embeds in pairs:
        one = PartialReference(
            reference, row.cut, is_active, has_prompt=row.active.has_prompt, **changes
        )
        one.predict(row, embeds, is_first=True)
        found.append(one.predict(row, embeds))
    if not owned.is_guided:
        return found[0]
    return found[1] + SCALE * (found[0] - found[1])
