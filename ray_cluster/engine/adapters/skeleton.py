"""A base model's layers, without weights, that the factors of LoRA files belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from torch import Tensor, nn

from ray_cluster.compat import lora_components
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.files.folders import (
    component_config,
    component_names,
    denoiser_name,
    pipeline_name,
)
from ray_cluster.engine.files.lora_names import LayerNames
from ray_cluster.engine.files.lora_said import PEFT_PREFIX, Said, said_of, spread, tensors_of
from ray_cluster.engine.models.denoisers import model_class
from ray_cluster.errors import ModelUnsupported

_NUM_NAMED = 3
# peft takes the names of layers in a header for regular expressions
_PLAIN = re.compile(r"\^?[\w.]+")
# of what a file says of its adapter: what its product depends on
_EFFECTIVE = frozenset({"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"})
# and what only training does
_OF_TRAINING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "init_lora_weights",
        # of libraries that it was not trained with
        "megatron_core",
        "qalora_group_size",
        "lora_dropout",
        "peft_version",
        "revision",
        # the file's own keys say this better
        "target_modules",
        "task_type",
    }
)


class _Pair(NamedTuple):
    """The factors of a layer, as the file has them."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class ReadLayers:
    """What a file comes to in the layers of a base.

    Attributes:
        by_component: by component, then by the path of the layer in it.
        unused: keys of the file that came to nothing.
    """

    by_component: Mapping[str, Mapping[str, LowRank]]
    unused: tuple[str, ...]


class Skeleton:
    """The components of a base that LoRAs may change, without weights.

    Args:
        base: the diffusers folder of the model.
    """

    def __init__(self, base: Path) -> None:
        denoiser = denoiser_name(base)
        config = component_config(base, denoiser)
        pipeline = getattr(diffusers, pipeline_name(base))
        loadable = set(lora_components(pipeline)) & set(component_names(base))
        with torch.device("meta"):
            self._parts: dict[str, nn.Module] = {
                denoiser: model_class(config).from_config(config),
                **{name: _text_encoder(base / name) for name in sorted(loadable - {denoiser})},
            }
        self._names = LayerNames(self._parts)

    def read(self, path: Path) -> ReadLayers:
        """Return what a safetensors file comes to.

        Raises:
            ModelUnsupported: a layer lacks a factor or has one of another size, or what the file
                says of its alphas is contradicted, or is another kind of adapter's.
        """
        said, tensors = said_of(path), tensors_of(path)
        if all(key.startswith(PEFT_PREFIX) for key in tensors):
            if "lora_alpha" not in said:
                raise ModelUnsupported(
                    "it has PEFT's own keys, and no adapter_config.json beside it nor a header "
                    "that says its alpha: save it with diffusers (save_lora_weights)"
                )
            tensors = {key.removeprefix(PEFT_PREFIX): one for key, one in tensors.items()}
        found = self._names.read(tensors)
        pairs = _pairs(found.factors)
        self._check_sizes(pairs)
        alphas, unknown = _alphas_of(found.alphas, pairs)
        ranks = {
            name: {one.down.shape[0] for one in layers.values()} for name, layers in pairs.items()
        }
        settings = spread(said, ranks) or {}
        if found.alphas and settings and not _agree(alphas, settings):
            raise ModelUnsupported("it has other alphas in its header than as tensors")
        settings = {} if found.alphas else _effective(settings)
        by_component = {}
        for name, layers in pairs.items():
            scales = _scales(layers, alphas[name], name, settings)
            by_component[name] = dict(self._scaled(name, layers, scales))
        return ReadLayers(by_component, (*found.unknown, *unknown))

    def _check_sizes(self, pairs: Mapping[str, Mapping[str, _Pair]]) -> None:
        wrong = []
        for name, layers in pairs.items():
            for path, (down, up) in layers.items():
                wanted = self._layer(name, path).weight.shape
                rank = down.shape[0] if down.ndim else 0
                whole = (wanted[0], rank, *[1] * (len(wanted) - 2))
                if rank < 1 or down.shape[1:] != wanted[1:] or up.shape != whole:
                    wrong.append(f"{name}.{path}")
        if wrong:
            raise ModelUnsupported(
                f"{len(wrong)} of its factors are of other sizes, such as that of {wrong[0]}"
            )

    def _layer(self, component: str, path: str) -> Any:
        return self._parts[component].get_submodule(path)

    def _scaled(
        self, component: str, layers: Mapping[str, _Pair], scales: Mapping[str, float]
    ) -> Iterator[tuple[str, LowRank]]:
        for path, (down, up) in layers.items():
            shrink, expand = down.float(), up.float().flatten(1) * scales[path]
            layer = self._layer(component, path)
            if isinstance(layer, nn.Conv2d):
                yield path, LowRank(shrink, expand, layer.stride, layer.padding)  # type: ignore[arg-type]
            else:
                yield path, LowRank(shrink, expand)


def _pairs(factors: Mapping[str, Tensor]) -> dict[str, dict[str, _Pair]]:
    """Return both factors of each layer, by component and path.

    Raises:
        ModelUnsupported: a layer has one of the two, or one of no floats.
    """
    found: dict[str, dict[str, _Pair]] = {}
    lacking = []
    for key, one in factors.items():
        if not one.is_floating_point():
            raise ModelUnsupported(f"it has factors of {one.dtype}, such as {key}")
        name, part = key.rsplit(".lora_", 1)
        other = f"{name}.lora_{'B' if part[0] == 'A' else 'A'}.weight"
        if other not in factors:
            lacking.append(other.removesuffix(".weight"))
        elif part[0] == "A":
            component, _, path = name.partition(".")
            found.setdefault(component, {})[path] = _Pair(one, factors[other])
    if lacking:
        raise ModelUnsupported(f"it lacks {len(lacking)} factors: {lacking[:_NUM_NAMED]}")
    return found


def _alphas_of(
    alphas: Mapping[str, float], pairs: Mapping[str, Mapping[str, _Pair]]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return alphas by component and path, and the keys of those that belong to no factors.

    Raises:
        ModelUnsupported: a layer has none where others of its component have one.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in pairs}
    unknown = []
    for key, alpha in alphas.items():
        component, _, path = key.removesuffix(".alpha").partition(".")
        if path in pairs.get(component, ()):
            found[component][path] = alpha
        else:
            unknown.append(key)
    for name, layers in pairs.items():
        bare = [path for path in layers if found[name] and path not in found[name]]
        if bare:
            raise ModelUnsupported(f"{len(bare)} layers of its {name} have no alpha: {bare[:3]}")
    return found, unknown


def _agree(alphas: Mapping[str, Mapping[str, float]], said: Said) -> bool:
    """Whether all that a header says is the alpha that each layer has as a tensor."""
    return all(
        said.get(f"{component}.lora_alpha", alpha) == alpha
        for component, own in alphas.items()
        for alpha in own.values()
    ) and not any("_pattern" in key or "rslora" in key for key, value in said.items() if value)


def _scales(
    layers: Mapping[str, _Pair], alphas: Mapping[str, float], component: str, said: Said
) -> dict[str, float]:
    """Return by how much the product of each layer is multiplied, by PEFT's rule.

    Raises:
        ModelUnsupported: what is said is no number, of other ranks, or of layers that are not here.
    """
    rank_of = said.get(f"{component}.rank_pattern") or {}
    alpha_of = said.get(f"{component}.alpha_pattern") or {}
    for patterns in (rank_of, alpha_of):
        if idle := [one for one in patterns if not any(_is_of(one, path) for path in layers)]:
            raise ModelUnsupported(f"it says a rank or alpha of layers that it has not: {idle[0]}")
    is_root = said.get(f"{component}.use_rslora") or False
    found = {}
    for path, (down, _) in layers.items():
        rank = down.shape[0]
        said_rank = _said_of(rank_of, path, said.get(f"{component}.r", rank))
        if said_rank != rank:
            raise ModelUnsupported(f"{component}.{path} has rank {rank}, and it says {said_rank!r}")
        alpha = _said_of(alpha_of, path, said.get(f"{component}.lora_alpha", rank))
        alpha = alphas.get(path, alpha)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise ModelUnsupported(f"it says {alpha!r} for the alpha of {component}.{path}")
        if not isinstance(is_root, bool):
            raise ModelUnsupported(f"it says use_rslora = {is_root!r}")
        found[path] = alpha / (rank**0.5 if is_root else rank)
    return found


def _said_of(patterns: Mapping[str, Any], path: str, whole: Any) -> Any:
    return next((value for one, value in patterns.items() if _is_of(one, path)), whole)


def _is_of(pattern: str, path: str) -> bool:
    """Whether PEFT would take a layer for one of those that a pattern names."""
    end = pattern.removeprefix("^")
    paths = (path, f"text_model.{path}")
    return end in paths or (end == pattern and any(one.endswith(f".{end}") for one in paths))


def _effective(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a file's settings those that count.

    Raises:
        ModelUnsupported: there are others that make it another kind of adapter.
    """
    kept = {}
    for key, value in metadata.items():
        name = key.rpartition(".")[2]
        if name in _EFFECTIVE:
            if "_pattern" in name:
                if not isinstance(value or {}, dict):
                    raise ModelUnsupported(f"it says {key} = {value!r}")
                odd = [one for one in value or () if not _PLAIN.fullmatch(one)]
                if odd:
                    raise ModelUnsupported(f"{key} has the regular expression {odd[0]!r}")
            kept[key] = value
        elif value and value not in ("none", "LORA") and name not in _OF_TRAINING:
            raise ModelUnsupported(f"it is an adapter with {key} = {value!r}, which is not covered")
    return kept


def _text_encoder(folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model: nn.Module = kind(config)
    return model
