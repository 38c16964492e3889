"""What a UNet's configuration may say for the lean executor to compute the same."""

from __future__ import annotations

from typing import Any

from ray_cluster.errors import ModelUnsupported

# the first of several allowed values stands for a key that is not there
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "addition_embed_type": (None, "text", "text_time"),
    # diffusers' pipelines that have classes make them of another image
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "class_embeddings_concat": (False,),
    "encoder_hid_dim_type": (None, "text_proj"),
    "time_embedding_act_fn": (None,),
    "center_input_sample": (False,),
    "attention_type": ("default",),
    "act_fn": ("silu", "swish"),
    "dual_cross_attention": (False,),
    "only_cross_attention": (False,),
    "resnet_time_scale_shift": ("default",),
    "resnet_out_scale_factor": (1.0,),
    "resnet_skip_time_act": (False,),
    "cross_attention_norm": (None,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None),
}
_ALLOWED_OF_CONTROLNETS: dict[str, tuple[Any, ...]] = {
    "global_pool_conditions": (False,),
    "controlnet_conditioning_channel_order": ("rgb", "bgr"),
    "conditioning_channels": (3,),
}
# what pipelines condition their UNet on beside the prompt; "text" is made of the prompt itself
_ADDITIONS: dict[str, tuple[str | None, ...]] = {
    "StableDiffusionPipeline": (None, "text"),
    "StableDiffusionXLPipeline": ("text_time",),
}


def check_unet_config(config: Any) -> None:
    """Refuse by name what the executor does not cover.

    Raises:
        ModelUnsupported: with the key, what was given and what is allowed.
    """
    for key, values in _ALLOWED.items():
        given = config.get(key, values[0])
        if given not in values:
            raise ModelUnsupported(f"unet config {key}={given!r} is not covered; allowed: {values}")
    takes, gives = config["in_channels"], config["out_channels"]
    if takes not in {gives, 2 * gives + 1}:
        raise ModelUnsupported(
            f"unet takes {takes} channels and gives {gives}; covered are UNets that take latents "
            f"({gives}), and inpainting ones that take a mask and masked latents beside them "
            f"({2 * gives + 1})"
        )


def check_controlnet_config(config: Any) -> None:
    """Refuse by name what is not covered of a ControlNet.

    Raises:
        ModelUnsupported: with the key, what was given and what is allowed.
    """
    for key, values in (_ALLOWED | _ALLOWED_OF_CONTROLNETS).items():
        given = config.get(key, values[0])
        if given not in values:
            raise ModelUnsupported(
                f"ControlNet config {key}={given!r} is not covered; allowed: {values}"
            )


def map_factor(config: Any) -> int:
    """Return how many pixels of a map's side a ControlNet makes one of."""
    # diffusers' own stages unless its file says others
    stages = config.get("conditioning_embedding_out_channels") or (16, 32, 96, 256)
    return int(2 ** (len(stages) - 1))


def check_unet_inputs(config: Any, pipeline: str) -> None:
    """Refuse a UNet that asks for what the pipeline of its folder does not give.

    Raises:
        ModelUnsupported: with the key, what was given and what is allowed.
    """
    key, values = "addition_embed_type", _ADDITIONS.get(pipeline, (None,))
    if (given := config.get(key)) not in values:
        raise ModelUnsupported(
            f"unet config {key}={given!r} asks for what a {pipeline} does not give; allowed: "
            f"{values}"
        )
