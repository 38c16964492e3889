"""The models that predict, by the class that their folder names: configurations and executors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from ray_cluster.engine.dit.config import check_dit_config
from ray_cluster.engine.dit.executor import DiTExecutor
from ray_cluster.engine.files.folders import component_config, denoiser_name
from ray_cluster.engine.schedules.flow_schedules import FlowModel
from ray_cluster.engine.step.executor import Executor
from ray_cluster.engine.unet.config import check_unet_config, check_unet_inputs
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.models.local import patch_size, vae_scale_factor
from ray_cluster.requests import EditKind, GuidanceKind

_UNET = "UNet2DConditionModel"
_FLUX = "FluxTransformer2DModel"


def is_unet(config: Mapping[str, Any]) -> bool:
    """Whether a component's configuration is that of a UNet."""
    return bool(config["_class_name"] == _UNET)


def is_flux(config: Mapping[str, Any]) -> bool:
    """Whether a component's configuration is that of FLUX's transformer."""
    return bool(config["_class_name"] == _FLUX)


def check_denoiser(config: Mapping[str, Any], pipeline: str) -> None:
    """Refuse by name what no executor covers, or its pipeline gives it no input for.

    Raises:
        ModelUnsupported: with the key, what was given and what is allowed.
    """
    if is_unet(config):
        check_unet_config(config)
        check_unet_inputs(config, pipeline)
    else:
        check_dit_config(config)


def build_executor(model: Any, vae_scale_factor: int, device: torch.device) -> Executor[Any, Any]:
    """Return the executor of a loaded model, which takes its weights over.

    Raises:
        ModelUnsupported: the model is made of something that no executor covers.
    """
    kind = UNetExecutor if type(model).__name__ == _UNET else DiTExecutor
    return kind(model, vae_scale_factor=vae_scale_factor, device=device)


def model_class(config: Mapping[str, Any]) -> Any:
    """Return the diffusers class of a component."""
    return getattr(diffusers, config["_class_name"])


def guidance_kind(config: Mapping[str, Any]) -> GuidanceKind:
    """Return what a guidance scale does in a model."""
    if is_unet(config):
        return "rows" if config.get("time_cond_proj_dim") is None else "embedded"
    if not is_flux(config):
        return "rows"
    return "embedded" if config.get("guidance_embeds", False) else "none"


def edit_kind(config: Mapping[str, Any]) -> EditKind:
    """Return what a model makes of images: inpainting models need a mask."""
    is_inpainting = config["in_channels"] != (config.get("out_channels") or config["in_channels"])
    return "masked" if is_inpainting else "any"


def flow_model(folder: Path) -> FlowModel | None:
    """Return what the schedules of a folder's model depend on; None for noise schedules."""
    config = component_config(folder, denoiser_name(folder))
    if is_unet(config):
        return None
    token_px = vae_scale_factor(component_config(folder, "vae")) * patch_size(config)
    return FlowModel(token_px=token_px, spaces_sigmas=is_flux(config))
