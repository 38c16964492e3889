"""Executor of the UNet family: one step of requests of any sizes, timesteps and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor

from ray_cluster.engine.executor import Residuals, StepBatch
from ray_cluster.engine.model_rows import KeptStacks, guide, lay_out, rows_of
from ray_cluster.engine.rings import Rings, Rows
from ray_cluster.engine.state import Conditioning
from ray_cluster.engine.token_layout import Level
from ray_cluster.engine.unet.blocks import LeanUNet, Pair, build_lean
from ray_cluster.engine.unet.config import check_unet_config
from ray_cluster.engine.unet.parts import Conditions, Downsample


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What a request's prompt comes to, the same in all its steps: one or two model rows.

    Attributes:
        keys_values: ``[1 or 2, T, P]``, of all cross-attentions; with guidance the negative
            prompt's first.
        added: ``[1 or 2, E]``, what is added to the time embedding (SDXL's conditions, classes);
            None for models without.
    """

    keys_values: Tensor
    added: Tensor | None


@dataclass(frozen=True, slots=True)
class EncodedHalf:
    """What the down and mid blocks hand to the up blocks; matrices ``[N, C]`` of their levels.

    Attributes:
        conditions: of every ring.
        hidden: of the innermost ring that has rows.
        skips: of the rings from the first one to that.
    """

    batch: StepBatch[PreparedPrompt]
    rings: Rings
    conditions: Sequence[Conditions]
    hidden: Tensor
    skips: tuple[Tensor, ...]


class UNetExecutor:
    """Runs the weights of a diffusers ``UNet2DConditionModel`` in two halves over flat matrices.

    Args:
        unet: the model, already on its device in its dtype. Its weights are taken over: the module
            itself cannot be called any more.
        vae_scale_factor: image pixels per latent pixel.
        device: where it computes; its weights may rest elsewhere when they are offloaded.

    Raises:
        ModelUnsupported: the UNet is made of something that the executor does not cover.
    """

    def __init__(
        self, unet: UNet2DConditionModel, *, vae_scale_factor: int, device: torch.device
    ) -> None:
        check_unet_config(unet.config)
        self._device = device
        # diffusers walks through all modules to answer this
        self._dtype = unet.dtype
        self._unet = unet.eval()
        self._lean: LeanUNet = build_lean(unet)
        self._vae_scale_factor = vae_scale_factor
        self._stacked = KeptStacks(_stack)

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._device

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._lean.num_levels

    @property
    def num_outer(self) -> range:
        """Numbers of skip connections within which it can keep and reuse what it makes."""
        return range(1, self._num_rings - 1 + bool(self._lean.middle))

    @property
    def patch_multiple(self) -> None:
        """It has no patch grain: convolutions would need what was kept around every patch."""
        return None

    @property
    def _num_rings(self) -> int:
        """One for every skip connection, and the middle."""
        return len(self._lean.inwards) + 2

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        factor = self._vae_scale_factor
        return (self._unet.config.in_channels, height_px // factor, width_px // factor)

    def prepare(self, conditioning: Conditioning) -> PreparedPrompt:
        """Compute what stays the same in all steps of a request."""
        embeds = torch.stack(rows_of(conditioning.negative_embeds, conditioning.prompt_embeds))
        embeds = embeds.to(self._dtype)
        added: dict[str, Tensor] = {}
        if conditioning.pooled_embeds is not None:
            pooled = rows_of(conditioning.negative_pooled_embeds, conditioning.pooled_embeds)
            assert conditioning.time_ids is not None, "pooled embeddings come with time ids"
            ids = torch.stack([conditioning.time_ids] * len(pooled))
            added = {"text_embeds": torch.stack(pooled).to(self._dtype), "time_ids": ids}
        shape = embeds.new_zeros(len(embeds), self._unet.time_embedding.linear_1.out_features)
        prompts = self._unet.process_encoder_hidden_states(
            encoder_hidden_states=embeds, added_cond_kwargs=added
        )
        conditions = self._unet.get_aug_embed(
            emb=shape, encoder_hidden_states=embeds, added_cond_kwargs=added
        )
        classes = self._unet.get_class_embed(sample=shape, class_labels=self._labels(conditioning))
        parts = [part for part in (classes, conditions) if part is not None]
        assert self._lean.prompts is not None
        return PreparedPrompt(
            keys_values=self._lean.prompts(prompts.flatten(0, 1)).unflatten(0, prompts.shape[:2]),
            added=torch.stack(parts).sum(0) if parts else None,
        )

    def _labels(self, conditioning: Conditioning) -> Tensor | None:
        """Return the class labels of a request's model rows."""
        labels = conditioning.class_labels
        if labels is None:
            return None
        negative = None
        if conditioning.is_guided:
            negative = conditioning.negative_class_labels
            negative = labels if negative is None else negative
        rows = torch.stack(rows_of(negative, labels))
        # a timestep is large: it is rounded only when it has become a wave
        return rows.to(self._dtype) if rows.ndim > 1 else rows

    def encode_half(self, batch: StepBatch[PreparedPrompt]) -> EncodedHalf:
        """Run time embedding, input convolution, down blocks and mid block."""
        lean = self._lean
        rings = Rings(batch, self._num_rings)
        conditions = self._conditions(batch, rings)
        flat = lay_out(batch, self._dtype)
        hidden = lean.first(flat, batch.layout.levels[0])
        skips = [hidden]
        for number, (part, level) in enumerate(lean.inwards, start=1):
            hidden = rings.narrow(hidden, number, Rows(batch.layout.levels[level].image_tokens))
            ring = rings[number + 1]
            if ring.is_empty:
                break
            if isinstance(part, Downsample):
                hidden = part(hidden, ring.layout.levels[level])
            else:
                hidden = _run(part, hidden, ring.layout.levels[level], conditions[number + 1])
            skips.append(hidden)
        else:
            hidden = self._run_middle(hidden, rings, conditions)
        return EncodedHalf(batch, rings, conditions, hidden, tuple(skips))

    def _run_middle(self, hidden: Tensor, rings: Rings, conditions: Sequence[Conditions]) -> Tensor:
        rows = Rows(rings[0].layout.levels[-1].image_tokens)
        hidden = rings.narrow(hidden, self._num_rings - 1, rows)
        ring = rings[self._num_rings]
        if ring.is_empty:
            return hidden
        for pair in self._lean.middle:
            hidden = _run(pair, hidden, ring.layout.levels[-1], conditions[-1])
        return hidden

    def decode_half(self, encoded: EncodedHalf, residuals: Residuals | None = None) -> Tensor:
        """Run up blocks and output convolution; return the guided prediction ``[M, C]``."""
        lean, batch, rings, hidden = self._lean, encoded.batch, encoded.rings, encoded.hidden
        skips = list(encoded.skips)
        if residuals is not None:
            hidden, skips = self._add(residuals, hidden, skips, rings)
        number = len(lean.inwards) + 1
        for pair, upsample, level in lean.outwards:
            ring, rows = rings[number], Rows(batch.layout.levels[level].image_tokens)
            if rings.is_cut(number):
                hidden = rings.widen(hidden, number, rows, rings.kept(number))
                rings.keep(number, [(hidden, rows)])
            if not ring.is_empty:
                levels = ring.layout.levels
                hidden = torch.cat([hidden, skips.pop()], dim=1)
                hidden = _run(pair, hidden, levels[level], encoded.conditions[number])
                if upsample is not None:
                    hidden = upsample(hidden, levels[level], levels[level - 1])
            number -= 1
        outer = batch.layout.levels[0]
        if lean.last_norm is not None:
            hidden = lean.last_norm(hidden, outer)
        return guide(lean.last(hidden, outer).float(), batch)

    def _add(
        self, residuals: Residuals, hidden: Tensor, skips: Sequence[Tensor], rings: Rings
    ) -> tuple[Tensor, list[Tensor]]:
        """Add what a ControlNet made, of the rows that are in each ring."""
        levels = [0, *(level + isinstance(part, Downsample) for part, level in self._lean.inwards)]
        added = []
        for number, (skip, more, level) in enumerate(
            zip(skips, residuals.down, levels, strict=False), start=1
        ):
            rows = Rows(rings[0].layout.levels[level].image_tokens)
            added.append(skip + rings.select(more, rings[0], rings[number], rows))
        if not rings[self._num_rings].is_empty:
            rows = Rows(rings[0].layout.levels[-1].image_tokens)
            own = rings.select(residuals.mid, rings[0], rings[self._num_rings], rows)
            hidden = hidden + own
        return hidden, added

    def _conditions(self, batch: StepBatch[PreparedPrompt], rings: Rings) -> list[Conditions]:
        """Return the conditions of every ring."""
        unet, layout = self._unet, batch.layout
        # of the sample it reads the number of rows and the dtype
        rows = batch.timesteps.to(self._dtype)
        embeds = unet.time_embedding(unet.get_time_embed(sample=rows, timestep=batch.timesteps))
        if layout.num_guided:
            embeds = embeds[layout.request_of_row(embeds.device)]
        prompts = self._stacked.of(batch, rings[0])
        if prompts.added is not None:
            embeds = embeds + prompts.added
        outer = Conditions(self._lean.time(F.silu(embeds)), prompts.keys_values)
        found = [outer]
        for depth in range(1, self._num_rings + 1):
            ring = rings[depth]
            if ring.images == rings[depth - 1].images or ring.is_empty:
                found.append(found[-1])
            else:
                own = self._stacked.of(batch, ring).keys_values
                found.append(Conditions(outer.time[list(ring.images)], own))
        return found


def _stack(rows: Sequence[tuple[PreparedPrompt, int]]) -> PreparedPrompt:
    added = None
    if rows[0][0].added is not None:
        added = torch.stack([one.added[row] for one, row in rows if one.added is not None])
    return PreparedPrompt(torch.stack([one.keys_values[row] for one, row in rows]), added)


def _run(pair: Pair, hidden: Tensor, level: Level, conditions: Conditions) -> Tensor:
    hidden = pair.resnet(hidden, level, conditions)
    if pair.transformer is None:
        return hidden
    return pair.transformer(hidden, level, conditions)
