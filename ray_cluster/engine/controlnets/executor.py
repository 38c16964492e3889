"""A ControlNet of the UNet family over flat matrices: residuals of requests of any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.controlnets.asks import RowResiduals
from ray_cluster.engine.models.packed_weights import packed_linear
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.rings import whole_ring
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.unet.blocks import build_lean_encoder
from ray_cluster.engine.unet.config import check_controlnet_config, map_factor
from ray_cluster.engine.unet.encoder import PreparedPrompt, UNetEncoder
from ray_cluster.engine.unet.grids import as_rows

# of CLIP's text encoders
_PROMPT_TOKENS = 77
# SDXL's: original size, crop and target size
_NUM_TIME_IDS = 6


class ControlNetExecutor:
    """Runs the weights of a diffusers ``ControlNetModel``, which are taken over.

    Args:
        model: already on its device in its dtype.
        device: where it computes.

    Raises:
        ModelUnsupported: it is made of something that is not covered.
    """

    def __init__(self, model: Any, *, device: torch.device) -> None:
        check_controlnet_config(model.config)
        self._model = model.eval()
        self._lean = build_lean_encoder(model)
        self._encoder = UNetEncoder(model, self._lean, device=device)
        self._outputs = [packed_linear(layer) for layer in model.controlnet_down_blocks]
        self._middle = packed_linear(model.controlnet_mid_block)
        self._is_bgr = model.config.controlnet_conditioning_channel_order == "bgr"

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._encoder.device

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._encoder.num_levels

    @property
    def num_channels(self) -> int:
        """Channels of the latents that it takes."""
        return int(self._model.config.in_channels)

    @property
    def map_factor(self) -> int:
        """Pixels of a map's side for one of the latents'."""
        return map_factor(self._model.config)

    def blank_conditioning(self) -> Conditioning:
        """Return a conditioning of zeros, for measurements."""
        config = self._model.config
        width = config.encoder_hid_dim or config.cross_attention_dim
        if not isinstance(width, int):
            width = width[0]
        prompt = torch.zeros(_PROMPT_TOKENS, width)
        if config.addition_embed_type != "text_time":
            return Conditioning(prompt)
        pooled = config.projection_class_embeddings_input_dim
        pooled -= _NUM_TIME_IDS * config.addition_time_embed_dim
        return Conditioning(
            prompt, pooled_embeds=torch.zeros(pooled), time_ids=torch.zeros(_NUM_TIME_IDS)
        )

    def prepare(self, conditioning: Conditioning) -> PreparedPrompt:
        """Compute what stays the same in all steps of a request."""
        return self._encoder.prepare(conditioning)

    def embed(self, control_map: Tensor) -> Tensor:
        """Return what a map adds to the input of each step, ``[h * w, C]``.

        Args:
            control_map: ``[H, W, 3]`` uint8, of the size of the image.
        """
        pixels = control_map.to(self.device).permute(2, 0, 1)[None].float() / 255
        if self._is_bgr:
            pixels = pixels.flip(1)
        embedded = self._model.controlnet_cond_embedding(pixels.to(self._encoder.dtype))
        return as_rows(embedded).contiguous()

    def compute(
        self, batch: StepBatch[PreparedPrompt], hints: Sequence[Tensor]
    ) -> list[RowResiduals]:
        """Return the residuals of each request of a batch, in the order of its layout.

        Args:
            hints: of each request, what :meth:`embed` made.
        """
        layout = batch.layout
        encoded = self._encoder.encode(batch, torch.cat([hints[one] for one in layout.row_request]))
        made = [output(flat) for output, flat in zip(self._outputs, encoded.skips, strict=True)]
        made.append(self._middle(encoded.hidden))
        levels = (*self._lean.skip_levels, self.num_levels - 1)
        by_request: list[list[Tensor]] = [[] for _ in range(layout.num_requests)]
        ring = whole_ring(layout)
        images = [
            [image for image, owner in enumerate(layout.row_request) if owner == request]
            for request in range(layout.num_requests)
        ]
        for flat, level in zip(made, levels, strict=True):
            rows = encoded.rows[level]
            parts = rows.split(flat[: sum(rows.lengths)], ring)
            for found, own in zip(by_request, images, strict=True):
                found.append(torch.cat([parts[image] for image in own]))
        return [RowResiduals(tuple(found[:-1]), found[-1]) for found in by_request]
