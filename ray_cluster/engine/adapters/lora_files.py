"""Reads LoRA files: safetensors of PEFT, diffusers and kohya (linear and LoCon), by diffusers' own
converters.

A file is loaded into a skeleton of the base model, without weights, exactly as diffusers would load
it into the model. So its factors are those that diffusers would use. What diffusers would drop with
a warning is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.denoisers import denoiser_name, model_class
from ray_cluster.engine.folders import component_config, component_names, pipeline_name
from ray_cluster.errors import MODEL_ERRORS, ModelUnsupported

_NAME = "one"
_NUM_NAMED = 3
_SUFFIX = ".safetensors"
# parts of keys -> the kind of adapter that has them
_OTHER_KINDS = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lora_mid": "Tucker (LoCon with a middle factor)",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "lora_controlnet": "control-LoRA",
    ".diff": "full differences of weights",
}


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The factors of a LoRA.

    Attributes:
        by_component: by component of the base's folder (``unet``, ``text_encoder``, ...), then by
            the path of the layer in it.
    """

    by_component: Mapping[str, Mapping[str, LowRank]]

    @property
    def num_bytes(self) -> int:
        """Of all factors."""
        return sum(one.num_bytes for part in self.by_component.values() for one in part.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Different ranks of its layers, in rising order."""
        found = {one.rank for part in self.by_component.values() for one in part.values()}
        return tuple(sorted(found))


def read_lora(path: Path, base: Path) -> LoraFactors:
    """Return the factors of a LoRA file for a model.

    Args:
        path: a safetensors file.
        base: the diffusers folder of the model.

    Raises:
        ModelUnsupported: it is no whole safetensors file, another kind of adapter, or made for
            another model; it names the first keys that are wrong.
    """
    if path.suffix != _SUFFIX:
        raise ModelUnsupported(
            f"{path.name} is no {_SUFFIX} file; other formats can hold programs and are not read"
        )
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelUnsupported(f"{path.name} cannot be read as safetensors: {error}") from error
    _check_kind(path, state)
    skeleton = _Skeleton(base)
    try:
        skeleton.load(state)
    except MODEL_ERRORS as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ModelUnsupported(f"{path.name} does not fit {base.name}: {reason}") from error
    found = skeleton.factors()
    _check_all_used(path, base, state, found)
    return LoraFactors(found)


def _check_kind(path: Path, state: Mapping[str, Tensor]) -> None:
    for part, kind in _OTHER_KINDS.items():
        keys = [key for key in state if part in key]
        if keys:
            raise ModelUnsupported(
                f"{path.name} is a {kind} adapter ({keys[0]}), which is not covered; covered are "
                "LoRAs of linear layers and convolutions"
            )
    if not any("lora" in key for key in state):
        raise ModelUnsupported(
            f"{path.name} has no LoRA keys; its first are {list(state)[:_NUM_NAMED]}"
        )
    bad = [key for key, one in state.items() if not torch.isfinite(one.float()).all()]
    if bad:
        raise ModelUnsupported(f"{path.name} has NaN or infinite factors: {bad[:_NUM_NAMED]}")


class _Skeleton:
    """A base model's components without weights, into which diffusers loads a LoRA."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._pipeline: Any = getattr(diffusers, pipeline_name(base))
        self.denoiser = denoiser_name(base)
        config = component_config(base, self.denoiser)
        with torch.device("meta"):
            parts: dict[str, nn.Module] = {self.denoiser: model_class(config).from_config(config)}
            for name in component_names(base):
                if name.startswith("text_encoder"):
                    parts[name] = _text_encoder(base / name)
        self._parts = parts
        for part in parts.values():
            _make_hollow(part)

    def load(self, state: dict[str, Tensor]) -> None:
        converted, alphas, metadata = self._converted(state)
        common = {"adapter_name": _NAME, "low_cpu_mem_usage": True}
        for name, part in self._parts.items():
            if not any(key.startswith(f"{name}.") for key in converted):
                continue
            if name == self.denoiser:
                load = getattr(self._pipeline, f"load_lora_into_{name}")
                load(converted, network_alphas=alphas, **{name: part}, metadata=metadata, **common)
            else:
                self._pipeline.load_lora_into_text_encoder(
                    converted,
                    network_alphas=alphas,
                    text_encoder=part,
                    prefix=name,
                    metadata=metadata,
                    **common,
                )

    def _converted(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any, Any]:
        options: dict[str, Any] = {"use_safetensors": True, "return_lora_metadata": True}
        if self.denoiser == "unet":
            options["unet_config"] = self._parts["unet"].config
        found = self._pipeline.lora_state_dict(dict(state), **options)
        if len(found) == 3:
            return found  # type: ignore[no-any-return]
        converted, metadata = found
        return converted, None, metadata

    def factors(self) -> dict[str, dict[str, LowRank]]:
        found = {name: dict(_factors_of(part)) for name, part in self._parts.items()}
        return {name: part for name, part in found.items() if part}


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


def _text_encoder(folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model: nn.Module = kind(config)
    return model


def _factors_of(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or _NAME not in layer.lora_A:
            continue
        shrink = layer.lora_A[_NAME].weight.detach().float()
        expand = layer.lora_B[_NAME].weight.detach().float().flatten(1) * layer.scaling[_NAME]
        base = layer.get_base_layer()
        if isinstance(base, nn.Conv2d):
            yield path, LowRank(shrink, expand, base.stride, base.padding)  # type: ignore[arg-type]
        else:
            yield path, LowRank(shrink, expand)


def _check_all_used(
    path: Path,
    base: Path,
    state: Mapping[str, Tensor],
    found: Mapping[str, Mapping[str, LowRank]],
) -> None:
    """Refuse a file of which something was not used: the image would silently lack it."""
    num_factors = sum(
        one.ndim > 1 and any(part in key for part in ("lora_A", "lora_down", "lora.down"))
        for key, one in state.items()
    )
    num_used = sum(len(part) for part in found.values())
    if num_used != num_factors or num_used == 0:
        raise ModelUnsupported(
            f"{path.name} has factors for {num_factors} layers, and {base.name} has "
            f"{num_used} of these: it is made for another model. Its first keys are "
            f"{list(state)[:_NUM_NAMED]}"
        )
