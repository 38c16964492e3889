"""Sets of LoRAs with random factors for nearly all layers of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraFactors
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.models.loading import LoadedModel
from tests.engine.random_loras import ATTENTION, pairs

_ENDINGS = (
    *ATTENTION,
    *("conv1", "conv2", "conv_shortcut", "net.0.proj", "net.2", "proj_in", "proj_out", "conv"),
    *("add_k_proj", "add_v_proj", "proj_mlp", "linear_1", "linear", "time_emb_proj", "x_embedder"),
)


def random_set(
    model: LoadedModel, pipeline: Any, *, seed: int = 0, scale: float = 1.0, size: float = 0.5
) -> AdapterSet:
    """A set for a model, whose layers diffusers' pipeline of the same folder has whole."""
    component = "unet" if hasattr(pipeline, "unet") else "transformer"
    denoiser = getattr(pipeline, component)
    found = pairs(denoiser, _ENDINGS, rank=3, seed=seed, size=size)
    layers = {path: _low_rank(denoiser.get_submodule(path), *pair) for path, pair in found.items()}
    return bind_adapters(model, [(LoraFactors({component: layers}), scale)])


def _low_rank(layer: Any, down: Any, up: Any) -> LowRank:
    low_rank = partial(LowRank, down, up.flatten(1))
    return low_rank(layer.stride, layer.padding) if down.ndim == 4 else low_rank()
