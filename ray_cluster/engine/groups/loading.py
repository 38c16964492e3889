"""Loads what one rank of a group needs: the transformer, and on one of them all else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.device.gpu import prepare_card, this_card, worker_device
from ray_cluster.engine.files.folders import component_config, denoiser_name, resolve_folder
from ray_cluster.engine.groups.rank_sets import RankSets
from ray_cluster.engine.groups.sharded import ShardedDiT
from ray_cluster.engine.models.loading import LoadedModel, load_model, number_type
from ray_cluster.engine.models.whole_models import load_models
from ray_cluster.models.local import vae_scale_factor


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that can step.

    Attributes:
        coder: the whole model, on the rank that encodes and decodes.
    """

    executor: ShardedDiT
    coder: LoadedModel | None = None


def load_rank(pool: PoolConfig, sets: RankSets, *, codes: bool) -> LoadedRank:
    """Load a rank's part of a pool's model.

    Args:
        codes: whether it encodes prompts and decodes images.

    Raises:
        ConfigError, ModelUnsupported, MemoryRefused: see
            :func:`ray_cluster.engine.models.loading.load_model`.
    """

    def sharded(model: torch.nn.Module, scale_factor: int, device: torch.device) -> ShardedDiT:
        return ShardedDiT(model, vae_scale_factor=scale_factor, device=device, sets=sets)

    if codes:
        whole = load_model(pool, sharded)
        assert isinstance(whole.executor, ShardedDiT), "it was made here"
        return LoadedRank(whole.executor, whole)
    folder, device = resolve_folder(*pool.files), worker_device(pool)
    card = this_card() if device.type == "cuda" else None
    dtype = number_type(pool, card)
    if card is not None:
        prepare_card(pool, card, dtype)
    name = denoiser_name(folder)
    model = load_models(folder, dtype, only={name})[name].requires_grad_(False).to(device)
    factor = vae_scale_factor(component_config(folder, "vae"))
    return LoadedRank(sharded(model, factor, device))
