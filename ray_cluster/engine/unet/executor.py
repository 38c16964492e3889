"""Executor of the UNet family: one step of requests of any sizes, timesteps and prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor

from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.deltas import LayerDeltas, adding, bound_deltas
from ray_cluster.engine.executor import Residuals, StepBatch
from ray_cluster.engine.model_rows import (
    KeptDeltas,
    KeptStacks,
    guide,
    lay_out,
    prepared_deltas,
    request_deltas,
    rows_of,
)
from ray_cluster.engine.packed_weights import can_pack
from ray_cluster.engine.rings import Rings, Rows
from ray_cluster.engine.state import Conditioning
from ray_cluster.engine.unet.blocks import LeanUNet, Pair, build_lean
from ray_cluster.engine.unet.config import check_unet_config
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
        self._dtype: torch.dtype = unet.dtype
        self._unet = unet.eval()
        self._rounds = can_pack(unet.conv_in.weight)
        self._lean: LeanUNet = build_lean(unet)
        self._vae_scale_factor = vae_scale_factor
        self._stacked = KeptStacks(_stack)
        self._deltas = KeptDeltas()

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self._dtype

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._lean.num_levels

    @property
    def num_conditions(self) -> int:
        """Channels of an inpainting UNet's input beside the latents; none of others."""
        return int(self._unet.config.in_channels - self._unet.config.out_channels)

    @property
    def num_outer(self) -> range:
        """Numbers of skip connections within which it can keep and reuse what it makes."""
        return range(1, self._num_rings - 1 + bool(self._lean.middle))

    @property
    def patch_multiple(self) -> int:
        """What the side of a patch must be a multiple of: that of the innermost level's pixels."""
        return int(2 ** (self.num_levels - 1))

    @property
    def _num_rings(self) -> int:
        """One for every skip connection, and the middle."""
        return len(self._lean.inwards) + 2

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        factor = self._vae_scale_factor
        return (self._unet.config.out_channels, height_px // factor, width_px // factor)

    def bind(self, deltas: Mapping[str, Delta]) -> LayerDeltas:
        """Return deltas for requests of this model; any linear layer and convolution may have one.

        Raises:
            ModelUnsupported: a path names no such layer.
        """
        return bound_deltas(self._unet, deltas)

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
        shape = embeds.new_zeros(len(embeds), self._unet.time_embedding.linear_1.out_features)
        own = prepared_deltas(deltas, len(embeds))
        with adding(own, self._unet):
            prompts = self._unet.process_encoder_hidden_states(
                encoder_hidden_states=embeds, added_cond_kwargs=added
            )
            conditions = self._unet.get_aug_embed(
                emb=shape, encoder_hidden_states=embeds, added_cond_kwargs=added
            )
        assert self._lean.prompts is not None
        num_rows, length = prompts.shape[:2]
        of_tokens = own and own.spread([length] * num_rows)
        keys_values = self._lean.prompts(prompts.flatten(0, 1), of_tokens)
        return PreparedPrompt(
            keys_values=keys_values.unflatten(0, (num_rows, length)),
            added=conditions,
        )

    def encode_half(self, batch: StepBatch[PreparedPrompt]) -> EncodedHalf:
        """Run time embedding, input convolution, down blocks and mid block."""
        lean = self._lean
        self._deltas.begin(batch)
        rings, rows = Rings(batch, self._num_rings), level_rows(batch)
        conditions = self._conditions(batch, rings, rows)
        flat = lay_out(batch, self._dtype)
        hidden = lean.first(flat, conditions[0].grids[0])
        skips = [hidden]
        for number, (part, level) in enumerate(lean.inwards, start=1):
            hidden = rings.narrow(hidden, number, rows[level])
            if rings[number + 1].is_empty:
                break
            within = conditions[number + 1]
            if isinstance(part, Downsample):
                hidden = part(hidden, *within.grids[level : level + 2])
            else:
                hidden = _run(part, hidden, level, within)
            skips.append(hidden)
        else:
            hidden = rings.narrow(hidden, self._num_rings - 1, rows[-1])
            if not rings[self._num_rings].is_empty:
                for pair in lean.middle:
                    hidden = _run(pair, hidden, -1, conditions[-1])
        return EncodedHalf(batch, rings, rows, conditions, hidden, tuple(skips))

    def decode_half(self, encoded: EncodedHalf, residuals: Residuals | None = None) -> Tensor:
        """Run up blocks and output convolution; return the guided prediction ``[M, C]``.

        Raises:
            ValueError: there are residuals of another number, or for a batch in which rows reuse.
        """
        lean, rings, hidden = self._lean, encoded.rings, encoded.hidden
        skips = list(encoded.skips)
        if residuals is not None:
            hidden, skips = _added(residuals, encoded)
        number = len(lean.inwards) + 1
        for pair, upsample, level in lean.outwards:
            rows, within = encoded.rows[level], encoded.conditions[number]
            if rings.is_cut(number):
                # what was kept stays as it is
                partial = rings[number + 1].partial
                kept = rings.kept(number)
                kept |= {image: kept[image].clone() for image in partial if image in kept}
                hidden = rings.widen(hidden, number, rows, kept)
                rings.keep(number, [(hidden, rows)])
            if not rings[number].is_empty:
                hidden = torch.cat([hidden, skips.pop()], dim=1)
                hidden = _run(pair, hidden, level, within)
                if upsample is not None:
                    hidden = upsample(hidden, within.grids[level], within.grids[level - 1])
            number -= 1
        outer = encoded.conditions[0].grids[0]
        if lean.last_norm is not None:
            hidden = lean.last_norm(hidden, outer)
        output = lean.last(hidden, outer)[: outer.level.num_tokens]
        return guide(output.float(), encoded.batch)

    def _conditions(
        self, batch: StepBatch[PreparedPrompt], rings: Rings, rows: Sequence[Rows]
    ) -> list[Conditions]:
        """Return the conditions of every ring."""
        unet, layout = self._unet, batch.layout
        # of the sample it reads the number of rows and the dtype
        sample = batch.timesteps.to(self._dtype)
        waves = unet.get_time_embed(sample=sample, timestep=batch.timesteps)
        scales = None
        if (width := unet.config.time_cond_proj_dim) is not None:
            scales = embedded_guidance(batch.guidance_scales, width).to(self._dtype)
        with adding(request_deltas(batch), unet.time_embedding):
            embeds = unet.time_embedding(waves, scales)
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
        for depth in range(1, self._num_rings + 1):
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


def _added(residuals: Residuals, encoded: EncodedHalf) -> tuple[Tensor, list[Tensor]]:
    """Return what the mid block made and the skip connections, with residuals added to each."""
    if encoded.batch.reuse:
        raise ValueError("rows that reuse activations cannot be in a batch that has residuals")
    if len(residuals.down) != len(encoded.skips):
        raise ValueError(
            f"residuals for {len(residuals.down)} skip connections; the model has "
            f"{len(encoded.skips)}"
        )
    skips = [_sum(*pair) for pair in zip(encoded.skips, residuals.down, strict=True)]
    return _sum(encoded.hidden, residuals.mid), skips


def _sum(hidden: Tensor, residual: Tensor) -> Tensor:
    """Return the sum of a matrix that may have rows to spare and one that has none."""
    if (num_spare := len(hidden) - len(residual)) > 0:
        residual = F.pad(residual, (0, 0, 0, num_spare))
    return hidden + residual


def _run(pair: Pair, hidden: Tensor, level: int, conditions: Conditions) -> Tensor:
    grid = conditions.grids[level]
    hidden = pair.resnet(hidden, grid, conditions)
    if pair.transformer is None:
        return hidden
    return pair.transformer(hidden, grid, conditions)
