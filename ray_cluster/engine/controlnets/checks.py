"""Finds ControlNets and checks whether they fit their bases, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.engine.files.folders import (
    component_config,
    denoiser_name,
    local_folder,
    resolve_single,
)
from ray_cluster.engine.unet.config import check_controlnet_config, map_factor
from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.builtin import BUILTIN_CONTROLNETS, controlnet_folder
from ray_cluster.models.json_files import read_object
from ray_cluster.models.local import vae_scale_factor

CONTROLNET_CLASS = "ControlNetModel"
_DOWNLOADED = ("config.json", "*.safetensors")
# what its residuals are added to, and what it reads, must be the base's
_SAME = ("block_out_channels", "layers_per_block", "cross_attention_dim")


def check_controlnet(given: ControlNetConfig, config: ClusterConfig) -> None:
    """Refuse a ControlNet that is not there, or that is not made for one of its bases.

    Bases that are not on this machine are not looked at.

    Raises:
        ConfigError, ModelUnsupported: with what is wrong.
    """
    own = controlnet_config(resolve_controlnet(given.model))
    for pool in config.pools:
        if pool.model_name not in given.bases or (folder := local_folder(*pool.files)) is None:
            continue
        denoiser = component_config(folder, denoiser_name(folder))
        factor = vae_scale_factor(component_config(folder, "vae"))
        check_base(given.name, own, pool.model_name, denoiser, factor)


def resolve_controlnet(model: str) -> Path:
    """Return the local folder of a ControlNet, downloaded if needed.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    return resolve_single(
        model,
        controlnet_folder(model),
        what="ControlNet",
        allowed=f"one of {', '.join(BUILTIN_CONTROLNETS)}, or a folder or hub id of a "
        f"{CONTROLNET_CLASS}",
        patterns=_DOWNLOADED,
    )


def controlnet_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of a ControlNet.

    Raises:
        ConfigError: it cannot be read.
        ModelUnsupported: it is of something else, or of what is not covered.
    """
    config = read_object(folder / "config.json")
    if (kind := config.get("_class_name")) != CONTROLNET_CLASS:
        raise ModelUnsupported(
            f"{folder} is a {kind}; ControlNets are {CONTROLNET_CLASS}s, those of diffusion "
            "transformers (SD3ControlNetModel, FluxControlNetModel) are not covered"
        )
    check_controlnet_config(config)
    return config


def check_base(
    name: str, config: Mapping[str, Any], base: str, unet: Mapping[str, Any], vae_scale_factor: int
) -> None:
    """Refuse a ControlNet that is made for another kind of model than its base.

    Args:
        config: of the ControlNet.
        unet: the configuration of the base's denoiser.
        vae_scale_factor: image pixels per latent pixel of the base.

    Raises:
        ModelUnsupported: with what differs.
    """
    if unet.get("_class_name") != "UNet2DConditionModel":
        raise ModelUnsupported(
            f"ControlNet {name}: its base {base} is no UNet; ControlNets of diffusion transformers "
            "are not covered"
        )
    differing = [
        f"{key} {config.get(key)} against {unet.get(key)}"
        for key in _SAME
        if _listed(config.get(key)) != _listed(unet.get(key))
    ]
    if (factor := map_factor(config)) != vae_scale_factor:
        differing.append(f"maps scaled down by {factor} against latents by {vae_scale_factor}")
    if differing:
        raise ModelUnsupported(
            f"ControlNet {name} is made for another kind of model than its base {base}: "
            f"{', '.join(differing)}; leave that base out of `bases`"
        )


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value
