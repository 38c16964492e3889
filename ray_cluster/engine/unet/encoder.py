"""The encoder half of a UNet over flat matrices, which ControlNets have too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas, adding
from ray_cluster.engine.models.packed_weights import can_pack
from ray_cluster.engine.models.wide_layers import widen
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.model_rows import (
    KeptDeltas,
    KeptStacks,
    lay_out,
    prepared_deltas,
    request_deltas,
    rows_of,
)
from ray_cluster.engine.step.rings import Rings, Rows
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.unet.blocks import LeanEncoder, Pair
from ray_cluster.engine.unet.grids import grids_of, level_rows
from ray_cluster.engine.unet.parts import Conditions, Downsample


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What a request's prompt comes to, the same in all its steps: one or two model rows.

    Attributes:
        keys_values: ``[1 or 2, T, P]``, of all cross-attentions; with guidance the negative
            prompt's first.
        added: ``[1 or 2, E]``, what is added to the time embedding (SDXL's conditions); None for
            models without.
    """

    keys_values: Tensor
    added: Tensor | None


@dataclass(frozen=True, slots=True)
class EncodedHalf:
    """What the down and mid blocks hand to the up blocks; matrices ``[N, C]`` of their levels.

    Attributes:
        rows: what each level's matrix has of every model row.
        conditions: of every ring.
        hidden: of the innermost ring that has rows.
        skips: of the rings from the first one to that.
    """

    batch: StepBatch[PreparedPrompt]
    rings: Rings
    rows: Sequence[Rows]
    conditions: Sequence[Conditions]
    hidden: Tensor
    skips: tuple[Tensor, ...]


class UNetEncoder:
    """Runs time embedding, input convolution, down and mid blocks of a diffusers model.

    Args:
        model: a ``UNet2DConditionModel`` or a ``ControlNetModel``, which has the same layers there.
        lean: the parts made of it.
        device: where it computes; its weights may rest elsewhere when they are offloaded.
    """

    def __init__(self, model: Any, lean: LeanEncoder, *, device: torch.device) -> None:
        self._device = device
        self._dtype = widen(model.eval(), device)
        self._model = model
        self._lean = lean
        self._rounds = can_pack(model.conv_in.weight)
        self._stacked = KeptStacks(_stack)
        self._deltas = KeptDeltas()

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return self._dtype

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._lean.num_levels

    @property
    def num_rings(self) -> int:
        """One for every skip connection, and the middle."""
        return len(self._lean.inwards) + 2

    def prepare(
        self, conditioning: Conditioning, deltas: LayerDeltas | None = None
    ) -> PreparedPrompt:
        """Compute what stays the same in all steps of a request, with what it adds to layers."""
        embeds = torch.stack(rows_of(conditioning.negative_embeds, conditioning.prompt_embeds))
        embeds = embeds.to(self._dtype)
        added: dict[str, Tensor] = {}
        if conditioning.pooled_embeds is not None:
            pooled = rows_of(conditioning.negative_pooled_embeds, conditioning.pooled_embeds)
            assert conditioning.time_ids is not None, "pooled embeddings come with time ids"
            ids = torch.stack([conditioning.time_ids] * len(pooled))
            added = {"text_embeds": torch.stack(pooled).to(self._dtype), "time_ids": ids}
        shape = embeds.new_zeros(len(embeds), self._model.time_embedding.linear_1.out_features)
        own = prepared_deltas(deltas, len(embeds))
        with adding(own, self._model):
            prompts = UNet2DConditionModel.process_encoder_hidden_states(
                self._model, encoder_hidden_states=embeds, added_cond_kwargs=added
            )
            conditions = UNet2DConditionModel.get_aug_embed(
                self._model, emb=shape, encoder_hidden_states=embeds, added_cond_kwargs=added
            )
        num_rows, length = prompts.shape[:2]
        # a ControlNet may have no cross-attention
        keys_values = prompts.new_empty(num_rows, length, 0)
        if self._lean.prompts is not None:
            of_tokens = own and own.spread([length] * num_rows)
            made = self._lean.prompts(prompts.flatten(0, 1), of_tokens)
            keys_values = made.unflatten(0, (num_rows, length))
        return PreparedPrompt(keys_values=keys_values, added=conditions)

    def encode(self, batch: StepBatch[PreparedPrompt], hints: Tensor | None = None) -> EncodedHalf:
        """Run it.

        Args:
            hints: ``[N, C]``, of all model rows, added to what the input convolution makes.
        """
        lean = self._lean
        self._deltas.begin(batch)
        rings, rows = Rings(batch, self.num_rings), level_rows(batch)
        conditions = self.conditions(batch, rings, rows)
        flat = lay_out(batch, self._dtype)
        hidden = lean.first(flat, conditions[0].grids[0])
        if hints is not None:
            hidden[: len(hints)] += hints
        skips = [hidden]
        for number, (part, level) in enumerate(lean.inwards, start=1):
            hidden = rings.narrow(hidden, number, rows[level])
            if rings[number + 1].is_empty:
                break
            within = conditions[number + 1]
            if isinstance(part, Downsample):
                hidden = part(hidden, *within.grids[level : level + 2])
            else:
                hidden = run_pair(part, hidden, level, within)
            skips.append(hidden)
        else:
            hidden = rings.narrow(hidden, self.num_rings - 1, rows[-1])
            if not rings[self.num_rings].is_empty:
                for pair in lean.middle:
                    hidden = run_pair(pair, hidden, -1, conditions[-1])
        return EncodedHalf(batch, rings, rows, conditions, hidden, tuple(skips))

    def conditions(
        self, batch: StepBatch[PreparedPrompt], rings: Rings, rows: Sequence[Rows]
    ) -> list[Conditions]:
        """Return the conditions of every ring."""
        model, layout = self._model, batch.layout
        # of the sample it reads the number of rows and the dtype
        sample = batch.timesteps.to(self._dtype)
        waves = UNet2DConditionModel.get_time_embed(model, sample=sample, timestep=batch.timesteps)
        scales = None
        if (width := model.config.get("time_cond_proj_dim")) is not None:
            scales = embedded_guidance(batch.guidance_scales, width).to(self._dtype)
        with adding(request_deltas(batch), model.time_embedding):
            embeds = model.time_embedding(waves, scales)
        if layout.num_guided:
            embeds = embeds.index_select(0, layout.request_of_row(embeds.device))
        prompts = self._stacked.of(batch, rings[0])
        if prompts.added is not None:
            embeds = embeds + prompts.added
        time = self._lean.time(F.silu(embeds), self._deltas.of(batch, rings[0]))
        keys_values = prompts.keys_values
        found = [
            Conditions(
                time,
                keys_values,
                grids_of(batch, rings, 0, rows, self._deltas, rounds=self._rounds),
            )
        ]
        for depth in range(1, self.num_rings + 1):
            ring = rings[depth]
            if ring.is_empty or not rings.is_cut(depth - 1):
                found.append(found[-1])
                continue
            grids = grids_of(batch, rings, depth, rows, self._deltas)
            if rings.is_whole(depth):
                found.append(Conditions(time, keys_values, grids))
            else:
                own = self._stacked.of(batch, ring).keys_values
                found.append(Conditions(time[list(ring.images)], own, grids))
        return found


def embedded_guidance(scales: Tensor, width: int) -> Tensor:
    """Return what a distilled model (LCM) takes of guidance scales ``[B]``: ``[B, width]``.

    Sines and cosines of the scale's excess over 1, times 1000 (Meng et al., On Distillation of
    Guided Diffusion Models, appendix A).
    """
    num_waves = width // 2
    steps = torch.arange(num_waves, dtype=torch.float32, device=scales.device)
    waves = torch.exp(steps * -(math.log(10_000.0) / (num_waves - 1)))
    angles = (scales.float() - 1.0)[:, None] * 1000.0 * waves
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


def _stack(rows: Sequence[tuple[PreparedPrompt, int]]) -> PreparedPrompt:
    added = None
    if rows[0][0].added is not None:
        added = torch.stack([one.added[row] for one, row in rows if one.added is not None])
    return PreparedPrompt(torch.stack([one.keys_values[row] for one, row in rows]), added)


def run_pair(pair: Pair, hidden: Tensor, level: int, conditions: Conditions) -> Tensor:
    """Return what a resnet and its transformer make of a level's matrix."""
    grid = conditions.grids[level]
    hidden = pair.resnet(hidden, grid, conditions)
    if pair.transformer is None:
        return hidden
    return pair.transformer(hidden, grid, conditions)
