"""What the models of the family differ in: patches, time, positions, blocks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from torch import Tensor

from ray_cluster.engine.adapters.deltas import RowDeltas, adding
from ray_cluster.engine.batch.spans import image_lengths
from ray_cluster.engine.batch.token_layout import Level
from ray_cluster.engine.dit.blocks import JointBlock, SingleBlock
from ray_cluster.engine.dit.packing import Joined, Packing, Parted, Streams
from ray_cluster.engine.dit.parts import Conditions, LastNorm
from ray_cluster.engine.dit.patches import from_channels_first, from_channels_last, to_patches
from ray_cluster.engine.dit.rotary import Rotary, RotaryTables
from ray_cluster.engine.models.packed_weights import packed_linear
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.model_rows import request_deltas
from ray_cluster.errors import ModelUnsupported

_FLUX_PATCH = 2
_FLUX_TIMESTEPS = 1000
_HALF_LIMIT = 65504.0


class LeanDiT(Protocol):
    """A DiT between latents and prediction."""

    @property
    def patch(self) -> int:
        """Latent pixels along a side of a token; a power of two."""

    @property
    def channels(self) -> int:
        """Of the latents."""

    @property
    def num_conditions(self) -> int:
        """Channels that it takes beside these: see :class:`Executor`."""

    def tokens(
        self,
        pixels: Tensor,
        levels: tuple[Level, ...],
        packing: Packing,
        references: Tensor | None,
        deltas: RowDeltas | None,
        /,
    ) -> Tensor:
        """Return the images' tokens ``[N, D]``: embedded patches of latents and references.

        Args:
            pixels: of the latents, with its conditions.
            references: patches ``[M, C * patch**2]``; None for none.
            deltas: of the images.

        Raises:
            ModelUnsupported: there are references, and the model looks at none.
        """

    def times(self, batch: StepBatch[Any], dtype: torch.dtype, /) -> Tensor:
        """Return what the embeddings of the requests' timesteps come to, ``[B, D]``."""

    def rotary(self, packing: Packing, device: torch.device, /) -> Rotary | None:
        """Return the positions that queries and keys are turned by, if they are."""

    @property
    def num_blocks(self) -> int:
        """Blocks, of all kinds."""

    def run(self, block: int, streams: Streams, conditions: Conditions) -> Streams:
        """Run one block."""

    def project(self, image: Tensor, conditions: Conditions) -> Tensor:
        """Return the prediction of tokens ``[N, D]``, a patch each: ``[N, patch**2 * C]``."""

    def pixels(self, patches: Tensor, levels: tuple[Level, ...]) -> Tensor:
        """Return patches of whole images as pixels, ``[N * patch**2, C]``."""


class LeanSD3:
    """Stable Diffusion 3 and 3.5: joint blocks, positions added to the patches."""

    def __init__(self, model: SD3Transformer2DModel) -> None:
        self.patch = int(model.config.patch_size)
        self.channels, self.num_conditions = int(model.config.in_channels), 0
        self._embed: Any = model.pos_embed
        self._time: Any = model.time_text_embed
        self._blocks = [JointBlock(block) for block in model.transformer_blocks]
        self._last_norm, self._last = LastNorm(model.norm_out), packed_linear(model.proj_out)

    def tokens(
        self,
        pixels: Tensor,
        levels: tuple[Level, ...],
        _packing: Packing,
        references: Tensor | None,
        deltas: RowDeltas | None,
    ) -> Tensor:
        """Return embedded patches; every size has its own part of the table of positions."""
        if references is not None:
            raise ModelUnsupported("Stable Diffusion 3 looks at no pictures beside the prompt")
        parts = []
        for segment in levels[0].segments:
            with adding(deltas and deltas.within(segment.images), self._embed):
                parts.append(self._embed(segment.as_images(pixels)).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def times(self, batch: StepBatch[Any], dtype: torch.dtype) -> Tensor:
        """Return the embeddings of timesteps; guidance takes a second model row instead."""
        waves = self._time.time_proj(batch.timesteps).to(dtype)
        with adding(request_deltas(batch), self._time):
            embedded: Tensor = self._time.timestep_embedder(waves)
        return embedded

    def rotary(self, _packing: Packing, _device: torch.device) -> Rotary | None:
        """Return nothing: positions are part of the patches."""
        return None

    @property
    def num_blocks(self) -> int:
        """Joint blocks."""
        return len(self._blocks)

    def run(self, block: int, streams: Streams, conditions: Conditions) -> Streams:
        """Run one block; the last one leaves the prompts as they are."""
        return Parted(*self._blocks[block](*streams.parted(conditions.packing), conditions))

    def project(self, image: Tensor, conditions: Conditions) -> Tensor:
        """Return the prediction by patch."""
        normed = self._last_norm(image, conditions.packing.image, conditions)
        return self._last(normed, conditions.image.deltas)

    def pixels(self, patches: Tensor, levels: tuple[Level, ...]) -> Tensor:
        """Return the prediction by pixel."""
        return from_channels_last(patches, levels[-1], self.patch)


class LeanFlux:
    """FLUX.1: joint blocks, then single ones; positions turn queries and keys."""

    def __init__(self, model: FluxTransformer2DModel) -> None:
        self.patch = _FLUX_PATCH
        self.channels = model.out_channels // _FLUX_PATCH**2
        self.num_conditions = int(model.config.in_channels) // _FLUX_PATCH**2 - self.channels
        self._embed = packed_linear(model.x_embedder)
        self._time: Any = model.time_text_embed
        self._embeds_guidance = bool(model.config.guidance_embeds)
        self._positions = RotaryTables(model.pos_embed)
        self._blocks = [JointBlock(block) for block in model.transformer_blocks]
        self._single_blocks = [SingleBlock(block) for block in model.single_transformer_blocks]
        self._last_norm, self._last = LastNorm(model.norm_out), packed_linear(model.proj_out)

    def tokens(
        self,
        pixels: Tensor,
        levels: tuple[Level, ...],
        packing: Packing,
        references: Tensor | None,
        deltas: RowDeltas | None,
    ) -> Tensor:
        """Return embedded patches."""
        if self.num_conditions:
            # it has what is spared before the mask
            own = self.channels
            parts = (pixels[:, :own], pixels[:, -own:], pixels[:, own:-own])
            pixels = torch.cat(parts, dim=1)
        patches = to_patches(pixels, levels[-1], self.patch)
        if references is not None:
            patches = packing.merge_references(patches, references)
        return self._embed(patches, deltas and deltas.spread(image_lengths(packing.image)))

    def times(self, batch: StepBatch[Any], dtype: torch.dtype) -> Tensor:
        """Return the embeddings of timesteps, with those of the scales where the model has such."""
        # rounded as on diffusers' way through the pipeline and the model
        timesteps = batch.timesteps.to(dtype) / _FLUX_TIMESTEPS * _FLUX_TIMESTEPS
        with adding(request_deltas(batch), self._time):
            waves = self._time.time_proj(timesteps).to(dtype)
            embedded: Tensor = self._time.timestep_embedder(waves)
            if self._embeds_guidance:
                scales = self._time.time_proj(batch.guidance_scales.to(dtype) * _FLUX_TIMESTEPS)
                embedded = embedded + self._time.guidance_embedder(scales.to(dtype))
        return embedded

    def rotary(self, packing: Packing, device: torch.device) -> Rotary | None:
        """Return the positions of the batch's joint rows."""
        return self._positions.of(packing, device)

    @property
    def num_blocks(self) -> int:
        """Joint and single blocks."""
        return len(self._blocks) + len(self._single_blocks)

    def run(self, block: int, streams: Streams, conditions: Conditions) -> Streams:
        """Run one block; the joint ones come first."""
        if block < len(self._blocks):
            image, prompt = self._blocks[block](*streams.parted(conditions.packing), conditions)
            return Parted(image, _within_half(prompt))
        single_block = self._single_blocks[block - len(self._blocks)]
        joint = streams.joined(conditions.packing)
        return Joined(_within_half(single_block(joint, conditions)))

    def project(self, image: Tensor, conditions: Conditions) -> Tensor:
        """Return the prediction by patch."""
        normed = self._last_norm(image, conditions.packing.image, conditions)
        return self._last(normed, conditions.image.deltas)

    def pixels(self, patches: Tensor, levels: tuple[Level, ...]) -> Tensor:
        """Return the prediction by pixel."""
        return from_channels_first(patches, levels[-1], self.patch)


def _within_half(rows: Tensor) -> Tensor:
    """Return rows without what is infinite in float16, as diffusers' FLUX does."""
    return rows.clip(-_HALF_LIMIT, _HALF_LIMIT) if rows.dtype == torch.float16 else rows
