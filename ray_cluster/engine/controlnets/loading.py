"""Loads ControlNets."""

from __future__ import annotations

import torch

from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.engine.controlnets.bank import ControlNetBank
from ray_cluster.engine.controlnets.checks import (
    CONTROLNET_CLASS,
    controlnet_config,
    resolve_controlnet,
)
from ray_cluster.engine.controlnets.executor import ControlNetExecutor
from ray_cluster.engine.files.weights import DTYPE_BY_NAME
from ray_cluster.engine.models.whole_models import load_whole
from ray_cluster.policies.costs.number_formats import default_format


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
    loaded = load_whole(folder, CONTROLNET_CLASS, dtype, "diffusers")
    return ControlNetExecutor(loaded.to(device), device=device)


def load_bank(
    given: ControlNetConfig, device: torch.device, dtype: torch.dtype | None = None
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
