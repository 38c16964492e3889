"""Executor for the UNet family (SD1.5, SDXL, the reference models) at one size per batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from ray_cluster.engine.executor import Residuals, StepBatch
from ray_cluster.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class Layout:
    """How the requests of a batch became rows of the model.

    The unconditional rows of the requests that use guidance come first, then one conditional row
    per request.

    Attributes:
        latents: ``[R, C, H, W]`` in the model's dtype.
        timesteps: ``[R]``.
        prompt_embeds: ``[R, T, D]``.
        added: SDXL's ``text_embeds`` ``[R, P]`` and ``time_ids`` ``[R, 6]``; else empty.
        guided: indices of the requests that use guidance.
        scales: their guidance scales, ``[G, 1, 1, 1]`` float32.
    """

    latents: Tensor
    timesteps: Tensor
    prompt_embeds: Tensor
    added: dict[str, Tensor]
    guided: tuple[int, ...]
    scales: Tensor


@dataclass(frozen=True, slots=True)
class EncodedHalf:
    """What the down and mid blocks hand to the up blocks."""

    layout: Layout
    hidden: Tensor
    skips: tuple[Tensor, ...]
    time_embeds: Tensor
    prompt_embeds: Tensor


class UNetExecutor:
    """Runs a diffusers ``UNet2DConditionModel`` in two halves, guidance rows only where needed.

    Args:
        unet: the model, already on its device in its dtype.
        vae_scale_factor: image pixels per latent pixel.
        device: where it computes; its weights may rest elsewhere when they are offloaded.

    Raises:
        ModelUnsupported: the UNet uses an input that the engine does not provide.
    """

    def __init__(
        self, unet: UNet2DConditionModel, *, vae_scale_factor: int, device: torch.device
    ) -> None:
        check_unet_config(unet.config)
        self._device = device
        # diffusers walks through all modules to answer this
        self._dtype = unet.dtype
        self._unet = unet.eval()
        self._vae_scale_factor = vae_scale_factor

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._device

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        factor = self._vae_scale_factor
        return (self._unet.config.in_channels, height_px // factor, width_px // factor)

    def open(self, batch: StepBatch) -> Layout:
        """Lay the requests out as model rows."""
        guided = tuple(i for i, scale in enumerate(batch.guidance_scales) if scale > 1.0)
        latents = batch.latents.to(self._dtype)
        conditionings = batch.conditionings
        embeds = [_present(conditionings[i].negative_embeds) for i in guided]
        embeds += [conditioning.prompt_embeds for conditioning in conditionings]
        scales = torch.tensor([batch.guidance_scales[i] for i in guided], device=latents.device)
        every = [*guided, *range(len(conditionings))]
        return Layout(
            latents=latents[every] if guided else latents,
            timesteps=batch.timesteps[every] if guided else batch.timesteps,
            prompt_embeds=torch.stack(embeds),
            added=_added_conditions(batch, guided),
            guided=guided,
            scales=scales.reshape(-1, 1, 1, 1),
        )

    def encode_half(self, batch: StepBatch) -> EncodedHalf:
        """Run time embedding, input convolution, down blocks and mid block."""
        unet, layout = self._unet, self.open(batch)
        hidden = layout.latents
        embeds = unet.time_embedding(unet.get_time_embed(sample=hidden, timestep=layout.timesteps))
        added = unet.get_aug_embed(
            emb=embeds,
            encoder_hidden_states=layout.prompt_embeds,
            added_cond_kwargs=layout.added,
        )
        if added is not None:
            embeds = embeds + added
        prompt_embeds = unet.process_encoder_hidden_states(
            encoder_hidden_states=layout.prompt_embeds, added_cond_kwargs=layout.added
        )
        hidden = unet.conv_in(hidden)
        skips: tuple[Tensor, ...] = (hidden,)
        for block in unet.down_blocks:
            hidden, passed = block(
                hidden_states=hidden, temb=embeds, **_attends(block, prompt_embeds)
            )
            skips += passed
        if unet.mid_block is not None:
            hidden = unet.mid_block(hidden, embeds, **_attends(unet.mid_block, prompt_embeds))
        return EncodedHalf(layout, hidden, skips, embeds, prompt_embeds)

    def decode_half(self, encoded: EncodedHalf, residuals: Residuals | None = None) -> Tensor:
        """Run up blocks and output convolution; return the guided prediction ``[B, C, H, W]``."""
        unet, hidden, skips = self._unet, encoded.hidden, encoded.skips
        if residuals is not None:
            hidden = hidden + residuals.mid
            skips = tuple(skip + more for skip, more in zip(skips, residuals.down, strict=True))
        # sides that do not halve evenly all the way need the next skip's size to upsample to
        whole = 2**unet.num_upsamplers
        is_uneven = any(side % whole for side in encoded.layout.latents.shape[-2:])
        for block in unet.up_blocks:
            count = len(block.resnets)
            passed, skips = skips[-count:], skips[:-count]
            size = skips[-1].shape[2:] if skips and is_uneven else None
            hidden = block(
                hidden_states=hidden,
                temb=encoded.time_embeds,
                res_hidden_states_tuple=passed,
                upsample_size=size,
                **_attends(block, encoded.prompt_embeds),
            )
        if unet.conv_norm_out is not None:
            hidden = unet.conv_act(unet.conv_norm_out(hidden))
        return _guide(unet.conv_out(hidden).float(), encoded.layout)


def check_unet_config(config: Any) -> None:
    """Refuse by name what the executor does not cover.

    Raises:
        ModelUnsupported: with the key, what was given and what is allowed.
    """
    allowed: dict[str, tuple[Any, ...]] = {
        "addition_embed_type": (None, "text_time"),
        "class_embed_type": (None,),
        "num_class_embeds": (None,),
        "encoder_hid_dim_type": (None, "text_proj"),
        "time_cond_proj_dim": (None,),
        "time_embedding_act_fn": (None,),
        "center_input_sample": (False,),
        "attention_type": ("default",),
    }
    for key, values in allowed.items():
        given = config.get(key, values[0])
        if given not in values:
            raise ModelUnsupported(f"unet config {key}={given!r} is not covered; allowed: {values}")
    if config["in_channels"] != config["out_channels"]:
        raise ModelUnsupported(
            f"unet takes {config['in_channels']} channels and gives {config['out_channels']}; "
            "only text-to-image UNets (equal numbers) are covered, no inpainting or editing ones"
        )


def _attends(block: torch.nn.Module, prompt_embeds: Tensor) -> dict[str, Tensor]:
    return {"encoder_hidden_states": prompt_embeds} if _has_cross_attention(block) else {}


def _has_cross_attention(block: torch.nn.Module) -> bool:
    return bool(getattr(block, "has_cross_attention", False))


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a guided request must have been encoded with its negative prompt"
    return tensor


def _added_conditions(batch: StepBatch, guided: tuple[int, ...]) -> dict[str, Tensor]:
    conditionings = batch.conditionings
    if conditionings[0].pooled_embeds is None:
        return {}
    pooled = [_present(conditionings[i].negative_pooled_embeds) for i in guided]
    pooled += [_present(conditioning.pooled_embeds) for conditioning in conditionings]
    ids = [_present(conditionings[i].time_ids) for i in (*guided, *range(len(conditionings)))]
    return {"text_embeds": torch.stack(pooled), "time_ids": torch.stack(ids)}


def _guide(output: Tensor, layout: Layout) -> Tensor:
    """Combine the rows of guided requests; the others' rows pass unchanged."""
    count = len(layout.guided)
    if count == 0:
        return output
    unconditional, conditional = output[:count], output[count:]
    index = list(layout.guided)
    guided = unconditional + layout.scales * (conditional[index] - unconditional)
    if count == len(conditional):
        return guided
    conditional[index] = guided
    return conditional
