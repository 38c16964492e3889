"""Executor of the DiT family: one step of requests of any sizes, timesteps and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas, RowDeltas, adding
from ray_cluster.engine.adapters.merged_weights import AdaptedModel
from ray_cluster.engine.dit.active import TokenRows
from ray_cluster.engine.dit.attention import AttentionKind, attention_for, start_attention
from ray_cluster.engine.dit.config import check_dit_config, check_dit_layers
from ray_cluster.engine.dit.models import LeanDiT, LeanFlux, LeanSD3
from ray_cluster.engine.dit.packing import Grids, Packing, Parted, narrowed, packing_of
from ray_cluster.engine.dit.parts import Conditions, TokenDeltas
from ray_cluster.engine.dit.walk import Walk, num_rings
from ray_cluster.engine.models.packed_weights import packed_linear
from ray_cluster.engine.models.wide_layers import widen
from ray_cluster.engine.step.executor import Residuals, StepBatch
from ray_cluster.engine.step.model_rows import (
    KeptDeltas,
    KeptStacks,
    guide,
    lay_out,
    prepared_deltas,
    rows_of,
)
from ray_cluster.engine.step.rings import Rings
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import ModelUnsupported

_NO_RESIDUALS = "ControlNets of diffusion transformers are not covered"


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What a request's prompt comes to, the same in all its steps: one or two model rows.

    Attributes:
        tokens: ``[1 or 2, T, D]``; with guidance the negative prompt's first.
        pooled: ``[1 or 2, D]``, what is added to the time embedding.
        references: ``[h, w, C * patch**2]`` each, the patches of the pictures that it looks at.
    """

    tokens: Tensor
    pooled: Tensor
    references: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompts:
    """What those of a batch come to, in the order of its model rows.

    Attributes:
        tokens: ``[R, T, D]``.
        pooled: ``[R, D]``.
        references: grids of each row's.
        patches: ``[N, C * patch**2]``, of all references; None where no row has any.
    """

    tokens: Tensor
    pooled: Tensor
    references: tuple[Grids, ...]
    patches: Tensor | None

    @property
    def length(self) -> int:
        """Tokens of each prompt."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class EncodedHalf:
    """What the blocks start from.

    Attributes:
        walk: through the blocks.
        streams: tokens of images ``[N, D]`` and of prompts ``[P, D]``.
    """

    batch: StepBatch[PreparedPrompt]
    walk: Walk
    streams: Parted


class DiTExecutor(AdaptedModel):
    """Runs the weights of a diffusers SD3 or FLUX transformer over packed tokens.

    The first half is what comes before the first block: that is where a ControlNet of these
    families would begin to add residuals. None is covered yet.

    Args:
        model: on its device in its dtype. Its weights are taken over: the module itself cannot be
            called any more.
        vae_scale_factor: image pixels per latent pixel.
        device: where it computes; its weights may rest elsewhere when they are offloaded.
        attention: the one that the device is taken to be fastest with, unless another is compared.

    Raises:
        ModelUnsupported: the model is made of something that the executor does not cover.
    """

    def __init__(
        self,
        model: SD3Transformer2DModel | FluxTransformer2DModel,
        *,
        vae_scale_factor: int,
        device: torch.device,
        attention: AttentionKind | None = None,
    ) -> None:
        check_dit_config(dict(model.config) | {"_class_name": type(model).__name__})
        check_dit_layers(model)
        self._device = device
        self._dtype = widen(model.eval(), device)
        self._model = model
        is_flux = isinstance(model, FluxTransformer2DModel)
        self._lean: LeanDiT = LeanFlux(model) if is_flux else LeanSD3(model)
        self._prompts = packed_linear(model.context_embedder)
        self._pooled: Any = model.time_text_embed.text_embedder
        self._of_prompts = frozenset([model.context_embedder, *self._pooled.modules()])
        self._attention = attention or attention_for(device, self._dtype)
        self._vae_scale_factor = vae_scale_factor
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
        """Resolutions that the layout of a batch must have: the last is that of the tokens."""
        return self._lean.patch.bit_length()

    @property
    def num_conditions(self) -> int:
        """Channels that it takes beside the latents: of FLUX.1 Fill."""
        return self._lean.num_conditions

    @property
    def num_outer(self) -> range:
        """Numbers of blocks at either end within which it can keep and reuse what others add."""
        return range((self._lean.num_blocks + 1) // 2)

    @property
    def patch_multiple(self) -> int:
        """What the side of a patch must be a multiple of: that of a token."""
        return self._lean.patch

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        factor = self._vae_scale_factor
        return (self._lean.channels, height_px // factor, width_px // factor)

    def prepare(
        self, conditioning: Conditioning, deltas: LayerDeltas | None = None
    ) -> PreparedPrompt:
        """Compute what stays the same in all steps of a request, with what it adds to layers."""
        embeds = torch.stack(rows_of(conditioning.negative_embeds, conditioning.prompt_embeds))
        # of a state from a pool of another dtype, too
        embeds = embeds.to(self._dtype)
        assert conditioning.pooled_embeds is not None, "these models have pooled embeddings"
        pooled = rows_of(conditioning.negative_pooled_embeds, conditioning.pooled_embeds)
        num_rows, length = embeds.shape[:2]
        own = prepared_deltas(deltas, num_rows)
        tokens = self._prompts(embeds.flatten(0, 1), own and own.spread([length] * num_rows))
        seen = [one.to(self._dtype) for one in conditioning.references]
        patches = [F.pixel_unshuffle(one, self._lean.patch).permute(1, 2, 0) for one in seen]
        with adding(own, self._pooled):
            return PreparedPrompt(
                tokens=tokens.unflatten(0, (num_rows, length)),
                pooled=self._pooled(torch.stack(pooled).to(self._dtype)),
                references=tuple(patches),
            )

    def encode_half(self, batch: StepBatch[PreparedPrompt]) -> EncodedHalf:
        """Embed patches, timesteps and positions."""
        lean = self._lean
        self._deltas.begin(batch)
        rings = Rings(batch, num_rings(lean))
        prompts = self._stacked.of(batch, rings[0])
        tokens = TokenRows.of(batch, prompts.length, lean.patch, prompts.references)
        conditions = self._conditions(batch, rings, prompts, tokens)
        streams = self._embedded(batch, prompts, conditions[0].packing, conditions[0].row_deltas)
        return EncodedHalf(batch, Walk(lean, rings, conditions, tokens), streams)

    def _embedded(
        self,
        batch: StepBatch[PreparedPrompt],
        prompts: Prompts,
        packing: Packing,
        deltas: RowDeltas | None,
    ) -> Parted:
        """Return what the blocks start from.

        Args:
            packing: of all tokens.
            deltas: of the model rows.
        """
        latents, levels = lay_out(batch, self._dtype), batch.layout.levels
        # references in every step: the layer may have had deltas merged into it since the last
        image = self._lean.tokens(latents, levels, packing, prompts.patches, deltas)
        return Parted(image, prompts.tokens.flatten(0, 1))

    def _conditions(
        self,
        batch: StepBatch[PreparedPrompt],
        rings: Rings,
        prompts: Prompts,
        tokens: TokenRows,
    ) -> list[Conditions]:
        """Return the conditions of every ring."""
        lean = self._lean
        embedding = self._embedding(batch, prompts)
        attend = start_attention(self._attention)
        found: list[Conditions] = []
        for depth in range(num_rings(lean) + 1):
            ring = rings[depth]
            if depth and (ring.is_empty or not rings.is_cut(depth - 1)):
                found.append(found[-1])
                continue
            seen = [prompts.references[image] for image in ring.images]
            packing = packing_of(ring.layout.levels[-1], prompts.length, seen)
            rotary = key_rotary = lean.rotary(packing, self._device)
            others = tokens.others(rings, depth)
            if ring.partial and others is not None:
                packing = narrowed(packing, tokens.counts(ring))
                rotary = key_rotary and key_rotary.at(others.places("joint", self._device))
            found.append(
                Conditions(
                    embedding=embedding if rings.is_whole(depth) else embedding[list(ring.images)],
                    packing=packing,
                    attend=attend,
                    rotary=rotary,
                    key_rotary=key_rotary,
                    others=others,
                    deltas=TokenDeltas.of(self._deltas.of(batch, ring), packing),
                )
            )
        return found

    def _embedding(self, batch: StepBatch[PreparedPrompt], prompts: Prompts) -> Tensor:
        """Return what blocks are modulated by: of every model row's timestep and pooled prompt."""
        layout, times = batch.layout, self._lean.times(batch, self._dtype)
        if layout.num_guided:
            times = times.index_select(0, layout.request_of_row(times.device))
        return F.silu(times + prompts.pooled)

    def cut(
        self,
        _encoded: EncodedHalf,
        _batch: StepBatch[PreparedPrompt],
        _keeps: Sequence[bool],
    ) -> EncodedHalf:
        """Refuse: only rows that wait for residuals are ever left out."""
        raise ModelUnsupported(_NO_RESIDUALS)

    def decode_half(self, encoded: EncodedHalf, residuals: Residuals | None = None) -> Tensor:
        """Run all blocks; return the guided prediction ``[M, C]``.

        Raises:
            ModelUnsupported: there are residuals.
        """
        if residuals is not None:
            raise ModelUnsupported(_NO_RESIDUALS)
        walk = encoded.walk
        image = walk.run(encoded.streams)
        levels = encoded.batch.layout.levels
        patches = self._lean.project(image, walk.conditions[0])
        output = self._lean.pixels(walk.conditions[0].packing.own_rows(patches), levels)
        return guide(output.float(), encoded.batch)


def _stack(rows: Sequence[tuple[PreparedPrompt, int]]) -> Prompts:
    seen = [patches.flatten(0, 1) for one, _ in rows for patches in one.references]
    return Prompts(
        tokens=torch.stack([one.tokens[row] for one, row in rows]),
        pooled=torch.stack([one.pooled[row] for one, row in rows]),
        references=tuple(
            tuple((patches.shape[0], patches.shape[1]) for patches in one.references)
            for one, _ in rows
        ),
        patches=torch.cat(seen) if seen else None,
    )
