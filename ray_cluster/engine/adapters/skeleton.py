"""A base model's components without weights, into which diffusers loads a LoRA."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
    recurse_remove_peft_layers,
)
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ray_cluster.compat import lora_components
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.files.folders import (
    component_config,
    component_names,
    denoiser_name,
    pipeline_name,
)
from ray_cluster.engine.files.lora_said import (
    PEFT_PREFIX,
    Said,
    said_of,
    spread,
    tensors_of,
)
from ray_cluster.engine.models.denoisers import model_class
from ray_cluster.errors import ModelUnsupported

_NAME = "one"
_NUM_NAMED = 3
_PARTS = frozenset({"A.weight", "B.weight"})
_NO_ALPHAS: dict[str, Any] = {"network_alphas": {}}
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
        "peft_type",
        "peft_version",
        "revision",
        # the file's own keys say this better
        "target_modules",
        "task_type",
    }
)


class _Owner(NamedTuple):
    """What a key of a file belongs to: a layer of a component, of which it is this part."""

    component: str
    layer: str
    part: str


@dataclass(frozen=True, slots=True)
class ReadLayers:
    """What a file comes to in the layers of a base.

    Attributes:
        by_component: by component, then by the path of the layer in it.
        unused: keys of the file, as converted, that came to nothing.
    """

    by_component: Mapping[str, Mapping[str, LowRank]]
    unused: tuple[str, ...]


class Skeleton:
    """The components of a base that diffusers loads LoRAs into, without weights.

    Args:
        base: the diffusers folder of the model.
    """

    def __init__(self, base: Path) -> None:
        self._pipeline: Any = getattr(diffusers, pipeline_name(base))
        self._denoiser = denoiser_name(base)
        config = component_config(base, self._denoiser)
        loadable = set(lora_components(self._pipeline)) & set(component_names(base))
        with torch.device("meta"):
            parts: dict[str, Any] = {
                self._denoiser: model_class(config).from_config(config),
                **{
                    name: _text_encoder(base / name) for name in sorted(loadable - {self._denoiser})
                },
            }
        for part in parts.values():
            _make_hollow(part)
        self._parts = parts

    def read(self, path: Path) -> ReadLayers:
        """Return what a safetensors file comes to; to be read by one thread at a time.

        After an error, which may be any of :data:`~ray_cluster.errors.MODEL_ERRORS`, it must not be
        used any more.
        """
        said = said_of(path)
        converted, alphas = self._converted(self._named(tensors_of(path), said))
        owners = dict(self._owners(converted))
        metadata = spread(said, _ranks(converted, owners))
        by_layer, unknown = self._alphas_of(alphas or {}, owners)
        if alphas and metadata is not None:
            if not _agree(by_layer, metadata):
                raise ModelUnsupported("it has other alphas in its header than as tensors")
            metadata = None
        if metadata is not None:
            metadata = _effective(metadata) | _targets(metadata, owners.values())
        common = {"adapter_name": _NAME, "low_cpu_mem_usage": True, "metadata": metadata}
        for name, part in self._parts.items():
            if not any(key.startswith(f"{name}.") for key in converted):
                continue
            if name == self._denoiser:
                load = getattr(self._pipeline, f"load_lora_into_{name}")
                # without alphas: of several, diffusers takes the commonest for most layers
                load(converted, **{name: part}, **({} if alphas is None else _NO_ALPHAS), **common)
            else:
                self._pipeline.load_lora_into_text_encoder(
                    converted, text_encoder=part, prefix=name, **_NO_ALPHAS, **common
                )
        found = {
            name: dict(_factors_of(part, by_layer[name])) for name, part in self._parts.items()
        }
        for part in self._parts.values():
            _unload(part)
        _check_whole(found, owners.values(), by_layer)
        unused = [
            key
            for key in converted
            if key not in owners or owners[key].layer not in found[owners[key].component]
        ]
        by_component = {name: layers for name, layers in found.items() if layers}
        return ReadLayers(by_component, (*unused, *unknown))

    def _named(self, tensors: dict[str, Tensor], said: Said) -> dict[str, Tensor]:
        """Return tensors under the component that PEFT has left out of their names.

        Raises:
            ModelUnsupported: the layers are of no component, or nothing says their alpha.
        """
        if not all(key.startswith(PEFT_PREFIX) for key in tensors):
            return tensors
        plain = {key.removeprefix(PEFT_PREFIX): one for key, one in tensors.items()}
        layer = next(iter(plain), "").partition(".lora_")[0]
        for name, part in self._parts.items():
            if layer in dict(part.named_modules()):
                if "lora_alpha" not in said:
                    raise ModelUnsupported(
                        "it has PEFT's own keys, and no adapter_config.json beside it nor a header "
                        "that says its alpha: save it with diffusers (save_lora_weights)"
                    )
                return {f"{name}.{key}": one for key, one in plain.items()}
        raise ModelUnsupported(f"it has no layer {layer!r}")

    def _converted(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Return the tensors by diffusers' names, and their alphas."""
        options: dict[str, Any] = {}
        match self._pipeline.__name__:
            case "StableDiffusion3Pipeline":
                return self._pipeline.lora_state_dict(tensors), None
            case "FluxPipeline":
                options["return_alphas"] = True
            case _:
                options["unet_config"] = self._parts[self._denoiser].config
        converted, alphas = self._pipeline.lora_state_dict(tensors, **options)
        return converted, alphas or {}

    def _owners(self, converted: Mapping[str, Tensor]) -> Iterator[tuple[str, _Owner]]:
        """Yield the keys that are a factor of a layer, with what they belong to."""
        for name, part in self._parts.items():
            prefix = f"{name}."
            own = [key for key in converted if key.startswith(prefix)]
            plain = [key.removeprefix(prefix) for key in own]
            renamed = _peft_keys(plain, is_denoiser=name == self._denoiser)
            for key, one in zip(own, renamed, strict=True):
                layer, mark, rest = one.removeprefix(_dropped(part)).partition(".lora_")
                if mark and rest in _PARTS:
                    yield key, _Owner(name, layer, rest)

    def _alphas_of(
        self, alphas: Mapping[str, Any], owners: Mapping[str, _Owner]
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        """Return alphas by component and layer, and the keys of those that belong to none."""
        layers = {(one.component, one.layer) for one in owners.values()}
        found: dict[str, dict[str, float]] = {name: {} for name in self._parts}
        unknown = []
        for key, alpha in alphas.items():
            # named by the layer, or by a factor of it
            name = key.removesuffix(".alpha")
            component, _, path = name.partition(".")
            part = self._parts.get(component)
            layer = path if part is None else path.removeprefix(_dropped(part))
            if name in owners:
                component, layer, _ = owners[name]
            if (component, layer) in layers:
                found[component][layer] = float(alpha)
            else:
                unknown.append(key)
        return found, unknown


def _agree(by_layer: Mapping[str, Mapping[str, float]], said: Said) -> bool:
    """Whether all that a header says is the alpha that each layer has as a tensor."""
    return all(
        said.get(f"{component}.lora_alpha", alpha) == alpha
        for component, alphas in by_layer.items()
        for alpha in alphas.values()
    ) and not any("_pattern" in key or "rslora" in key for key, value in said.items() if value)


def _ranks(converted: Mapping[str, Tensor], owners: Mapping[str, _Owner]) -> dict[str, set[int]]:
    """Return the ranks of each component's factors."""
    found: dict[str, set[int]] = {}
    for key, owner in owners.items():
        if owner.part == "A.weight":
            found.setdefault(owner.component, set()).add(converted[key].shape[0])
    return found


def _dropped(part: nn.Module) -> str:
    """Return what files may have before paths in a text encoder that has it no more."""
    return "" if hasattr(part, "text_model") else "text_model."


def _check_whole(
    found: Mapping[str, Mapping[str, LowRank]],
    owners: Collection[_Owner],
    alphas: Mapping[str, Mapping[str, float]],
) -> None:
    """Refuse a file of which a layer has one factor, or no alpha where others have one.

    Text encoders would take zeros for the factor, and diffusers another layer's alpha.
    """
    present = set(owners)
    for name, layers in found.items():
        half = [
            f"{name}.{path}.lora_{part}"
            for path in layers
            for part in sorted(_PARTS)
            if _Owner(name, path, part) not in present
        ]
        if half:
            raise ModelUnsupported(f"it lacks {len(half)} factors: {half[:_NUM_NAMED]}")
        bare = [path for path in layers if alphas[name] and path not in alphas[name]]
        if bare:
            raise ModelUnsupported(f"{len(bare)} layers of its {name} have no alpha: {bare[:3]}")


def _peft_keys(keys: Sequence[str], *, is_denoiser: bool) -> list[str]:
    """Return keys as PEFT spells them, by diffusers' own converters."""
    if not keys or ".lora_A." in keys[0] or ".lora_B." in keys[0]:
        return list(keys)
    numbered: Any = {key: torch.tensor(index) for index, key in enumerate(keys)}
    if is_denoiser:
        numbered = convert_unet_state_dict_to_peft(numbered)
    else:
        numbered = convert_state_dict_to_peft(convert_state_dict_to_diffusers(numbered))
    by_index = {int(index): key for key, index in numbered.items()}
    # of two that become one, the first has been lost
    return [by_index.get(index, key) for index, key in enumerate(keys)]


def _effective(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a file's settings those that count.

    Raises:
        ModelUnsupported: there are others that make it another kind of adapter.
    """
    kept = {}
    for key, value in metadata.items():
        name = key.rpartition(".")[2]
        if name in _EFFECTIVE:
            odd = [one for one in value if not _PLAIN.fullmatch(one)] if "_pattern" in name else []
            if odd:
                raise ModelUnsupported(f"{key} has the regular expression {odd[0]!r}")
            kept[key] = value
        elif value and value != "none" and name not in _OF_TRAINING:
            raise ModelUnsupported(f"it is an adapter with {key} = {value!r}, which is not covered")
    return kept


def _targets(metadata: Mapping[str, Any], owners: Collection[_Owner]) -> dict[str, Any]:
    """Return the layers that the file has factors of, for each component that its header names.

    So what the header says of them, which may be a regular expression, is never looked at.
    """
    named = {key.partition(".")[0] for key in metadata}
    return {
        f"{name}.target_modules": sorted({one.layer for one in owners if one.component == name})
        for name in {one.component for one in owners} & named
    }


def _make_hollow(model: nn.Module) -> None:
    """Give a model on no device parameters on the CPU that take no memory: one number, repeated.

    What is loaded beside parameters on no device would be on none, too.
    """
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            hollow = nn.Parameter(torch.zeros(()).expand(one.shape), requires_grad=False)
            setattr(module, name, hollow)
        for name, buffer in module.named_buffers(recurse=False):
            hollow_buffer = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
            module.register_buffer(name, hollow_buffer, persistent=False)


def _unload(part: Any) -> None:
    """Take a LoRA out of a component again."""
    recurse_remove_peft_layers(part)
    if hasattr(part, "peft_config"):
        del part.peft_config
    part._hf_peft_config_loaded = False


def _text_encoder(folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model: nn.Module = kind(config)
    return model


def _factors_of(model: nn.Module, alphas: Mapping[str, float]) -> Iterator[tuple[str, LowRank]]:
    """Yield paths and factors, scaled by a layer's own alpha or by what the header says."""
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or _NAME not in layer.lora_A:
            continue
        first, second = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach()
        if first.is_meta or second.is_meta:
            # the file has one of the two
            continue
        scale = alphas[path] / first.shape[0] if path in alphas else float(layer.scaling[_NAME])
        shrink, expand = first.float(), second.float().flatten(1) * scale
        base = layer.get_base_layer()
        if isinstance(base, nn.Conv2d):
            yield path, LowRank(shrink, expand, base.stride, base.padding)  # type: ignore[arg-type]
        else:
            yield path, LowRank(shrink, expand)
