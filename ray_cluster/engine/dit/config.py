"""What a DiT may be made of for the lean executor to compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ray_cluster.errors import ModelUnsupported

_FLUX = "FluxTransformer2DModel"
_CONFIGS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "SD3Transformer2DModel": {
        "patch_size": (2, 1, 4, 8),
        "qk_norm": (None, "rms_norm"),
    },
    _FLUX: {"patch_size": (1,)},
}
# by the class of a layer, what its attributes may be; of objects their class's name counts
_LAYERS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "JointTransformerBlock": {"_chunk_size": (None,)},
    "Attention": {
        "processor": ("JointAttnProcessor2_0",),
        "residual_connection": (False,),
        "rescale_output_factor": (1.0,),
    },
    "FluxAttention": {"processor": ("FluxAttnProcessor",), "fused_projections": (False,)},
    "GELU": {"approximate": ("tanh",)},
    "PatchEmbed": {"layer_norm": (False,)},
}
_BLOCKS = ("JointTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock")
_ACTIVATIONS = ("GELU",)


def check_dit_config(config: Mapping[str, Any]) -> None:
    """Refuse by name what the executor does not cover.

    Raises:
        ModelUnsupported: with the key, what was given and what is allowed.
    """
    name = config["_class_name"]
    if name not in _CONFIGS:
        raise ModelUnsupported(f"transformer {name} is not covered; allowed: {tuple(_CONFIGS)}")
    for key, values in _CONFIGS[name].items():
        given = config.get(key, values[0])
        if given not in values:
            raise ModelUnsupported(
                f"transformer config {key}={given!r} is not covered; allowed: {values}"
            )
    out_channels = config.get("out_channels") or config["in_channels"]
    # FLUX.1 Fill: the latents, those of what a mask spares, and the mask's pixels
    fills = name == _FLUX and config["in_channels"] > 2 * out_channels
    if config["in_channels"] != out_channels and not fills:
        raise ModelUnsupported(
            f"transformer takes {config['in_channels']} channels and gives {out_channels}; only "
            "equal numbers are covered, and FLUX.1 Fill's, which sees a masked image beside them"
        )
    if name == "SD3Transformer2DModel" and not config.get("pos_embed_max_size", 96):
        raise ModelUnsupported(
            "transformer config pos_embed_max_size=None is not covered; allowed: a number of "
            "patches, from whose positions each size takes the middle"
        )


def check_dit_layers(model: nn.Module) -> None:
    """Refuse by name layers that compute something else than the lean parts would.

    Raises:
        ModelUnsupported: with the layer, what it has and what is allowed.
    """
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        for block in getattr(model, blocks, ()):
            _check_kind(block, _BLOCKS)
    for name, part in model.named_modules():
        if type(part).__name__ == "FeedForward":
            _check_kind(part.net[0], _ACTIVATIONS)
        for key, allowed in _LAYERS.get(type(part).__name__, {}).items():
            given = getattr(part, key)
            if given not in allowed and type(given).__name__ not in allowed:
                raise ModelUnsupported(
                    f"transformer layer {name} has {key}={given!r}; allowed: {allowed}"
                )


def _check_kind(part: nn.Module, allowed: tuple[str, ...]) -> None:
    if type(part).__name__ not in allowed:
        raise ModelUnsupported(
            f"transformer layer {type(part).__name__} is not covered; allowed: {allowed}"
        )
