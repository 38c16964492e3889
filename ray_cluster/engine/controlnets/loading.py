"""Finds, checks and loads ControlNets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ray_cluster.config.sections.controlnets import ControlNetArguments
from ray_cluster.engine.controlnets.bank import ControlNetBank
from ray_cluster.engine.controlnets.executor import ControlNetExecutor
from ray_cluster.engine.files.folders import resolve_single
from ray_cluster.engine.files.weights import DTYPE_BY_NAME
from ray_cluster.engine.models.whole_models import load_whole
from ray_cluster.engine.unet.config import check_controlnet_config, map_factor
from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.builtin import BUILTIN_CONTROLNETS, controlnet_folder
from ray_cluster.models.json_files import read_object
from ray_cluster.policies.costs.number_formats import default_format

_CLASS = "ControlNetModel"
_DOWNLOADED = ("config.json", "*.safetensors")
# what its residuals are added to, and what it reads, must be the base's
_SAME = ("block_out_channels", "layers_per_block", "cross_attention_dim")


def load_controlnet(
    model: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> ControlNetExecutor:
    """Load a ControlNet.

    Args:
        model: a built-in one, or a folder or hub id.

    Raises:
        ConfigError: there is no such model, or a file is missing or damaged.
        ModelUnsupported: it is no ControlNet of the UNet family.
    """
    folder = resolve_controlnet(model)
    controlnet_config(folder)
    loaded = load_whole(folder, _CLASS, dtype, "diffusers")
    return ControlNetExecutor(loaded.to(device), device=device)


def load_bank(
    given: ControlNetArguments, device: torch.device, dtype: torch.dtype | None = None
) -> ControlNetBank:
    """Load a ControlNet of a configuration, with room for what it keeps of requests.

    Args:
        dtype: where it runs beside its base, that one's; its own configuration's otherwise.

    Raises:
        ConfigError, ModelUnsupported: see :func:`load_controlnet`.
    """
    if dtype is None:
        capability = torch.cuda.get_device_capability() if given.device == "cuda" else None
        name = given.dtype or default_format(given.device, capability)
        assert name is not None, "it is open only where the GPU is not known"
        dtype = DTYPE_BY_NAME[name]
    executor = load_controlnet(given.model, device, dtype)
    return ControlNetBank(executor, max_bytes=given.max_cached_mib << 20)


def resolve_controlnet(model: str) -> Path:
    """Return the local folder of a ControlNet, downloaded if needed.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    return resolve_single(
        model,
        controlnet_folder(model),
        what="ControlNet",
        allowed=f"one of {', '.join(BUILTIN_CONTROLNETS)}, or a folder or hub id of a {_CLASS}",
        patterns=_DOWNLOADED,
    )


def controlnet_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of a ControlNet.

    Raises:
        ConfigError: it cannot be read.
        ModelUnsupported: it is of something else, or of what is not covered.
    """
    config = read_object(folder / "config.json")
    if (kind := config.get("_class_name")) != _CLASS:
        raise ModelUnsupported(
            f"{folder} is a {kind}; ControlNets are {_CLASS}s, those of diffusion transformers "
            "(SD3ControlNetModel, FluxControlNetModel) are not covered"
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
