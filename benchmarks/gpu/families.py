"""The models that are measured: published configurations, or tiny ones of the same families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch

VAE_SCALE_FACTOR = 8


@dataclass(frozen=True, slots=True)
class Family:
    """A model with random weights.

    Attributes:
        name: short, as in ``--only``.
        source: where its configuration stands.
        kind: diffusers' class.
        config: its arguments; what is not there is the class's own default.
        scheduler: class and arguments of the noise scheduler that the pipeline comes with.
        prompt_tokens: that a prompt's embedding has in the pipeline.
        guidance_scale: usual with the model.
        embeds_guidance: whether the scale is an input, and takes no second model row.
        repeated: classes of the blocks that regional compilation compiles.
    """

    name: str
    source: str
    kind: str
    config: Mapping[str, Any]
    scheduler: tuple[str, Mapping[str, Any]]
    prompt_tokens: int
    guidance_scale: float
    embeds_guidance: bool
    repeated: tuple[str, ...]

    @property
    def is_unet(self) -> bool:
        """Whether it is a UNet, and no transformer."""
        return self.kind == "UNet2DConditionModel"

    @property
    def is_guided(self) -> bool:
        """Whether guidance takes a second model row for each image."""
        return not self.embeds_guidance

    @property
    def prompt_width(self) -> int:
        """Channels of a prompt's embedding."""
        return int(self.config["cross_attention_dim" if self.is_unet else "joint_attention_dim"])

    @property
    def pooled_width(self) -> int:
        """Channels of a prompt's pooled embedding."""
        if not self.is_unet:
            return int(self.config["pooled_projection_dim"])
        ids = 6 * int(self.config["addition_time_embed_dim"])
        return int(self.config["projection_class_embeddings_input_dim"]) - ids

    def latent_shape(self, size_px: tuple[int, int]) -> tuple[int, int, int]:
        """Return ``(C, h, w)`` of the latents of an image of a width and height."""
        channels = int(self.config["in_channels"])
        # FLUX counts those of a patch of two by two
        channels = channels // 4 if self.kind == "FluxTransformer2DModel" else channels
        width, height = (side // VAE_SCALE_FACTOR for side in size_px)
        return (channels, height, width)

    def build(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
        """Return the model with random weights, made on the device in the dtype.

        PyTorch's usual ones times the square root of 3: a layer's outputs have its inputs'
        variance. With a third of it, as usual, little of the timestep would reach the prediction
        through the many layers of modulations, and a wrong one would hardly show.
        """
        kind = getattr(diffusers, self.kind)
        before = torch.get_default_dtype()
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = kind(**self.config)
        finally:
            torch.set_default_dtype(before)
        # some parts choose a dtype of their own
        model = model.to(dtype).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3**0.5)
        return model

    def noise_scheduler(self) -> Any:
        """Return a new noise scheduler."""
        name, config = self.scheduler
        return getattr(diffusers, name)(**config)


_SDXL_SCHEDULER = (
    "EulerDiscreteScheduler",
    {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "timestep_spacing": "leading",
        "steps_offset": 1,
    },
)
_SD3_SCHEDULER = ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
_FLUX_SCHEDULER = (
    "FlowMatchEulerDiscreteScheduler",
    {
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
)
_UNET_BLOCKS = ("BasicTransformerBlock",)
_SD3_BLOCKS = ("JointTransformerBlock",)
_FLUX_BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")


_SDXL = Family(
    name="sdxl",
    source="stabilityai/stable-diffusion-xl-base-1.0, unet/config.json",
    kind="UNet2DConditionModel",
    config={
        "sample_size": 128,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (320, 640, 1280),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
    },
    scheduler=_SDXL_SCHEDULER,
    prompt_tokens=77,
    guidance_scale=5.0,
    embeds_guidance=False,
    repeated=_UNET_BLOCKS,
)
_SD3 = Family(
    name="sd3",
    source="stabilityai/stable-diffusion-3-medium-diffusers, transformer/config.json",
    kind="SD3Transformer2DModel",
    config={
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 192,
    },
    scheduler=_SD3_SCHEDULER,
    # 77 of CLIP, 256 of T5
    prompt_tokens=333,
    guidance_scale=7.0,
    embeds_guidance=False,
    repeated=_SD3_BLOCKS,
)
_FLUX = Family(
    name="flux",
    source="black-forest-labs/FLUX.1-dev, transformer/config.json",
    kind="FluxTransformer2DModel",
    config={
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    },
    scheduler=_FLUX_SCHEDULER,
    prompt_tokens=512,
    # usual is 3.5: the 3500 that the model makes of it is none of bfloat16's numbers, and
    # the rounding of that one input would outweigh all others
    guidance_scale=4.0,
    embeds_guidance=True,
    repeated=_FLUX_BLOCKS,
)


def published() -> tuple[Family, ...]:
    """Return the models as they are published."""
    return (_SDXL, _SD3, _FLUX)


_TINY: Mapping[str, Mapping[str, Any]] = {
    "sdxl": {
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "attention_head_dim": (2, 4),
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
        "norm_num_groups": 8,
    },
    "sd3": {
        "sample_size": 16,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 24,
    },
    "flux": {
        "in_channels": 32,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
}


def tiny() -> tuple[Family, ...]:
    """Return the same families so small that a CPU has all of them measured in seconds."""
    return tuple(
        replace(
            one,
            source=f"tiny; the same layers as {one.source}",
            config={**one.config, **_TINY[one.name]},
            prompt_tokens=7,
        )
        for one in published()
    )
