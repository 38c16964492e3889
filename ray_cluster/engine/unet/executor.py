"""Executor of the UNet family: one step of requests of any sizes, timesteps and prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.merged_weights import AdaptedModel
from ray_cluster.engine.step.executor import Residuals, StepBatch
from ray_cluster.engine.step.model_rows import guide
from ray_cluster.engine.step.rings import Rings, part_of, whole_ring
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.unet.blocks import LeanUNet, build_lean, prompt_layers
from ray_cluster.engine.unet.config import check_unet_config
from ray_cluster.engine.unet.encoder import EncodedHalf, PreparedPrompt, UNetEncoder, run_pair
from ray_cluster.engine.unet.grids import level_rows


class UNetExecutor(AdaptedModel):
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
        self._model: UNet2DConditionModel = unet
        self._lean: LeanUNet = build_lean(unet)
        self._encoder = UNetEncoder(unet, self._lean, device=device)
        self._of_prompts = prompt_layers(unet)
        self._vae_scale_factor = vae_scale_factor

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._encoder.device

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return self._encoder.dtype

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._lean.num_levels

    @property
    def num_conditions(self) -> int:
        """Channels of an inpainting UNet's input beside the latents; none of others."""
        return int(self._model.config.in_channels - self._model.config.out_channels)

    @property
    def num_outer(self) -> range:
        """Numbers of skip connections within which it can keep and reuse what it makes."""
        return range(1, self._encoder.num_rings - 1 + bool(self._lean.middle))

    @property
    def patch_multiple(self) -> int:
        """What the side of a patch must be a multiple of: that of the innermost level's pixels."""
        return int(2 ** (self.num_levels - 1))

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        factor = self._vae_scale_factor
        return (self._model.config.out_channels, height_px // factor, width_px // factor)

    def prepare(
        self, conditioning: Conditioning, deltas: LayerDeltas | None = None
    ) -> PreparedPrompt:
        """Compute what stays the same in all steps of a request, with what it adds to layers."""
        return self._encoder.prepare(conditioning, deltas)

    def encode_half(self, batch: StepBatch[PreparedPrompt]) -> EncodedHalf:
        """Run time embedding, input convolution, down blocks and mid block."""
        return self._encoder.encode(batch)

    def cut(
        self, encoded: EncodedHalf, batch: StepBatch[PreparedPrompt], keeps: Sequence[bool]
    ) -> EncodedHalf:
        """Return the half of some of a batch's requests; see :meth:`Executor.cut`."""
        outer = whole_ring(encoded.batch.layout)
        inner = part_of(encoded.batch.layout, tuple(keeps))
        rings, rows = Rings(batch, self._encoder.num_rings), level_rows(batch)
        conditions = self._encoder.conditions(batch, rings, rows)

        def kept(flat: Tensor, level: int) -> Tensor:
            of_level = encoded.rows[level]
            parts = of_level.split(flat[: sum(of_level.lengths)], outer)
            return conditions[0].grids[level].stacked([parts[image] for image in inner.images])

        skips = zip(encoded.skips, self._lean.skip_levels, strict=True)
        return EncodedHalf(
            batch=batch,
            rings=rings,
            rows=rows,
            conditions=conditions,
            hidden=kept(encoded.hidden, self.num_levels - 1),
            skips=tuple(kept(flat, level) for flat, level in skips),
        )

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
                hidden = run_pair(pair, hidden, level, within)
                if upsample is not None:
                    hidden = upsample(hidden, within.grids[level], within.grids[level - 1])
            number -= 1
        outer = encoded.conditions[0].grids[0]
        if lean.last_norm is not None:
            hidden = lean.last_norm(hidden, outer)
        output = lean.last(hidden, outer)[: outer.level.num_tokens]
        return guide(output.float(), encoded.batch)


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
    """Return the sum of a matrix that may have rows to spare and one that has none.

    The residual may come from another process: it takes the matrix's device and number format.
    """
    residual = residual.to(hidden)
    if (num_spare := len(hidden) - len(residual)) > 0:
        residual = F.pad(residual, (0, 0, 0, num_spare))
    return hidden + residual
