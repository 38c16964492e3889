"""Whether the ControlNets of a configuration fit their bases, before any weight is loaded."""

from __future__ import annotations

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.engine.controlnets.loading import check_base, controlnet_config, resolve_controlnet
from ray_cluster.engine.files.folders import component_config, local_folder
from ray_cluster.engine.models.denoisers import denoiser_name
from ray_cluster.models.local import vae_scale_factor


def check_controlnet(given: ControlNetConfig, config: ClusterConfig) -> None:
    """Refuse a ControlNet that is not there, or that is not made for one of its bases.

    Bases that are not on this machine are not looked at.

    Raises:
        ConfigError, ModelUnsupported: with what is wrong.
    """
    own = controlnet_config(resolve_controlnet(given.model))
    for pool in config.pools:
        if pool.model_name not in given.bases or (folder := local_folder(pool.model)) is None:
            continue
        denoiser = component_config(folder, denoiser_name(folder))
        factor = vae_scale_factor(component_config(folder, "vae"))
        check_base(given.name, own, pool.model_name, denoiser, factor)
