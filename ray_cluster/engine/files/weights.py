"""What the weights of a folder take once they are loaded, and in which number formats they are."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from ray_cluster.compat import float32_modules
from ray_cluster.engine.files.folders import component_config
from ray_cluster.engine.models.whole_models import component_class, stored_tensors
from ray_cluster.models.checkpoints.gguf_files import GgufTensor, gguf_tensors
from ray_cluster.models.weight_files import Component, components, weight_files
from ray_cluster.policies.costs.number_formats import NumberFormat

DTYPE_BY_NAME: Mapping[NumberFormat, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_VAE = "vae"
_ENCODERS = "text_encoder"


@dataclass(frozen=True, slots=True)
class ComponentWeights:
    """The weights of one component.

    Attributes:
        num_bytes: of all of them.
        layer_bytes: of its largest layer, which comes to the device where it is offloaded.
    """

    num_bytes: int
    layer_bytes: int


def is_text_encoder(name: str) -> bool:
    """Whether a component of this name encodes prompts."""
    return name.startswith(_ENCODERS)


def vae_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Return the number format of an autoencoder beside a denoiser of a format.

    It is float32 instead of float16 where the autoencoder overflows in that, by its own
    ``force_upcast``; a config without the key takes the default of its class, as when it is loaded.

    Args:
        config: of its folder.
    """
    parameters = inspect.signature(getattr(diffusers, config["_class_name"]).__init__).parameters
    default = parameters["force_upcast"].default if "force_upcast" in parameters else False
    overflows = dtype == torch.float16 and config.get("force_upcast", default)
    return torch.float32 if overflows else dtype


def component_weights(folder: Path, dtype: torch.dtype) -> dict[str, ComponentWeights]:
    """Return what the components of a folder take once loaded in a number format, by name.

    Raises:
        ConfigError: a file is damaged.
        ModelUnsupported: a class is not covered.
    """
    return {
        component.name: _weights(folder, component, dtype)
        for component in components(folder)
        if component.has_weights
    }


def _weights(folder: Path, component: Component, dtype: torch.dtype) -> ComponentWeights:
    if component.name == _VAE:
        dtype = vae_dtype(component_config(folder, _VAE), dtype)
    kept = kept_in_float32(component_class(folder, component), component.library, dtype)
    bytes_by_layer: dict[str, int] = defaultdict(int)
    files = weight_files(folder, component)
    if files.is_gguf:
        return _quantised(gguf_tensors(files.paths[0]).values(), dtype)
    for name, tensor in stored_tensors(files).items():
        is_kept = not kept.isdisjoint(name.split("."))
        itemsize = torch.float32.itemsize if is_kept else dtype.itemsize
        bytes_by_layer[name.rpartition(".")[0]] += itemsize * tensor.numel()
    return ComponentWeights(sum(bytes_by_layer.values()), max(bytes_by_layer.values(), default=0))


def _quantised(tensors: Collection[GgufTensor], dtype: torch.dtype) -> ComponentWeights:
    """Return what quantised weights take, with the largest of them widened, as a product has it."""
    stored = sum(one.num_bytes if one.is_quantised else _size(one, dtype) for one in tensors)
    # in float32 on the way, and then in the format of the rows
    widened = max(_size(one, torch.float32) + _size(one, dtype) for one in tensors)
    return ComponentWeights(stored + widened, widened)


def _size(tensor: GgufTensor, dtype: torch.dtype) -> int:
    return dtype.itemsize * math.prod(tensor.shape)


def kept_in_float32(kind: Any, library: str, dtype: torch.dtype) -> frozenset[str]:
    """Return the names of modules that a class keeps in float32 when it is loaded in a format.

    T5 has some (``wo``), a sixth of its weights and more. Transformers keeps most of them in place
    of float16 alone, and diffusers in place of any format.
    """
    kept = float32_modules(kind)
    if library == "transformers":
        kept = kept if dtype == torch.float16 else frozenset()
        kept |= float32_modules(kind, is_strict=True)
    return kept
