"""Layers of a model by the names that LoRA files have for them, of whichever program.

kohya's sd-scripts, LyCORIS and ComfyUI name layers of the models as their makers published them
(but those of Stable Diffusion 1.5), OneTrainer both these and diffusers' own; with dots or with
underscores. Makers' names are as of diffusers' ``scripts/convert_*`` and OneTrainer's
``modules/util/convert/lora``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ray_cluster.errors import ModelUnsupported

_PREFIXES = {
    "unet": ("", "lora_unet_", "unet_", "diffusion_model_", "lycoris_unet_", "lycoris_"),
    "transformer": (
        *("", "lora_transformer_", "transformer_", "lora_unet_", "diffusion_model_"),
        *("lycoris_transformer_", "lycoris_"),
    ),
    "text_encoder": (
        *("", "lora_te_", "lora_te1_", "text_encoder_", "clip_l_"),
        "text_encoders_clip_l_transformer_",
    ),
    "text_encoder_2": (
        *("", "lora_te2_", "text_encoder_2_", "clip_g_"),
        "text_encoders_clip_g_transformer_",
    ),
}
# T5 of FLUX is the second or third encoder
_T5 = re.compile(
    r"lora_te[23]_encoder_block_|text_encoder_[23]\.encoder\.block\.|text_encoders\.t5xxl\.|t5\."
)
_FACTOR = re.compile(
    r"(.+?)[._](?:lora_(?:(A)|B)(?:\.default)?|(?:lora_|lora\.|lora_linear_layer\.)?(?:(down)|up))"
    r"\.weight"
)
_ALPHA = ".alpha"
# of attention, as diffusers wrote it once
_OLD_UNET = re.compile(r"(\.attn[12]\.)(to_\w+)(?:\.0)?")
_OLD_ENCODER = re.compile(r"(self_attn\.)(\w+)_proj")
_ATTENTION = {
    "attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "attn.proj": "attn.to_out.0",
}
_TEXT_ATTENTION = {
    "attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "attn.proj": "attn.to_add_out",
}
_XLABS = [f"processor.{kind}_lora{index}" for index in (1, 2) for kind in ("qkv", "proj")]
_Rows = Mapping[tuple[str, str], Mapping[str, str]]
_FLUX: _Rows = {
    ("", ""): {
        "img_in": "x_embedder",
        "img_in.proj": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
    ("double_blocks", "transformer_blocks"): {
        **{f"img_{there}": here for there, here in _ATTENTION.items()},
        **{f"txt_{there}": here for there, here in _TEXT_ATTENTION.items()},
        "img_mlp.0": "ff.net.0.proj",
        "img_mlp.2": "ff.net.2",
        "img_mod.lin": "norm1.linear",
        "txt_mlp.0": "ff_context.net.0.proj",
        "txt_mlp.2": "ff_context.net.2",
        "txt_mod.lin": "norm1_context.linear",
        # of XLabs' files
        **dict(zip(_XLABS, (*_ATTENTION.values(), *_TEXT_ATTENTION.values()), strict=True)),
    },
    ("single_blocks", "single_transformer_blocks"): {
        "linear1": f"{_ATTENTION['attn.qkv']} proj_mlp",
        "linear2": "proj_out",
        "modulation.lin": "norm.linear",
        # of XLabs' files
        "processor.qkv": _ATTENTION["attn.qkv"],
        "processor.proj": "proj_out",
    },
}
_SD3: _Rows = {
    ("", ""): {
        "x_embedder.proj": "pos_embed.proj",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
    ("joint_blocks", "transformer_blocks"): {
        **{f"x_block.{there}": here for there, here in _ATTENTION.items()},
        **{f"context_block.{there}": here for there, here in _TEXT_ATTENTION.items()},
        "x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
        "x_block.attn2.proj": "attn2.to_out.0",
        "x_block.mlp.fc1": "ff.net.0.proj",
        "x_block.mlp.fc2": "ff.net.2",
        "x_block.adaLN_modulation.1": "norm1.linear",
        "context_block.mlp.fc1": "ff_context.net.0.proj",
        "context_block.mlp.fc2": "ff_context.net.2",
        "context_block.adaLN_modulation.1": "norm1_context.linear",
    },
}
_MAKERS = {"FluxTransformer2DModel": _FLUX, "SD3Transformer2DModel": _SD3}
# there, shift and scale stand the other way round
_SWAPPED = "AdaLayerNormContinuous"
_SGM = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


class Place(NamedTuple):
    """What a name stands for: one layer of a component here, or several that are one there."""

    component: str
    paths: tuple[str, ...]
    is_swapped: bool = False


@dataclass
class NamedFactors:
    """Tensors of a file by layers of a model.

    Attributes:
        factors: by component, path and ``lora_A.weight`` or ``lora_B.weight``.
        alphas: by component, path and ``alpha``.
        unknown: what is named for no layer.
    """

    factors: dict[str, Tensor] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, Tensor] = field(default_factory=dict)


class LayerNames:
    """All names of the layers of a model.

    Args:
        parts: components that LoRAs may change.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self._sizes = {
            f"{name}.{path}": int(layer.weight.shape[0])
            for name, part in parts.items()
            for path, layer in _layers(part)
        }
        self._names = {name: dict(_names(name, part)) for name, part in parts.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> NamedFactors:
        """Return tensors by the layers that they are of.

        Raises:
            ModelUnsupported: they are of T5, of several components by their names, or two for one.
        """
        found = NamedFactors()
        for key, one in tensors.items():
            if _T5.match(key):
                raise ModelUnsupported(
                    f"it has factors of a text encoder T5 ({key}), which are not covered; covered "
                    "are LoRAs of the model and of CLIP"
                )
            factor = _FACTOR.fullmatch(key)
            stem = factor[1] if factor else key.removesuffix(_ALPHA)
            place = self._place(stem) if factor or key.endswith(_ALPHA) else None
            if place is None or (factor is None and one.numel() != 1):
                found.unknown[key] = one
            elif factor is None:
                for path in place.paths:
                    _put(found.alphas, f"{place.component}.{path}{_ALPHA}", float(one))
            else:
                is_down = bool(factor[2] or factor[3])
                for path, part in zip(place.paths, self._parts(place, one, is_down), strict=True):
                    letter = "A" if is_down else "B"
                    _put(found.factors, f"{place.component}.{path}.lora_{letter}.weight", part)
        return found

    def _place(self, stem: str) -> Place | None:
        plain = stem.replace(".", "_")
        places = {
            place
            for name, places in self._names.items()
            for prefix in _PREFIXES[name]
            if plain.startswith(prefix) and (place := places.get(plain.removeprefix(prefix)))
        }
        if len(places) > 1:
            raise ModelUnsupported(f"{stem} may be of any of {sorted(one[0] for one in places)}")
        return next(iter(places), None)

    def _parts(self, place: Place, one: Tensor, is_down: bool) -> list[Tensor]:
        if is_down:
            return [one] * len(place.paths)
        if place.is_swapped:
            one = torch.cat(one.chunk(2)[::-1])
        if len(place.paths) == 1:
            return [one]
        sizes = [self._sizes[f"{place.component}.{path}"] for path in place.paths]
        return list(one.split(sizes)) if sum(sizes) == len(one) else [one] * len(sizes)


def _put(into: dict[str, Any], name: str, one: Any) -> None:
    if name in into:
        raise ModelUnsupported(f"it has {name} by two names")
    into[name] = one


def _layers(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, layer in part.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            yield path, layer


def _names(component: str, part: Any) -> Iterator[tuple[str, Place]]:
    """Yield names, with underscores for dots, and what they stand for."""
    layers = dict(_layers(part))
    for path in layers:
        place = Place(component, (path,))
        spellings = {path}
        if component.startswith("text_encoder"):
            spellings.add(_OLD_ENCODER.sub(r"\1to_\2", path))
            # the first part of which newer versions of transformers have left out
            spellings |= {f"text_model.{one}" for one in spellings}
        elif component == "unet":
            spellings |= {_sgm(path, part), _OLD_UNET.sub(r"\1processor.\2", path)}
        for one in spellings:
            yield one.replace(".", "_"), place
    for there, paths in _makers(part):
        name = there.replace(".", "_")
        if all(path in layers for path in paths):
            owner = part.get_submodule(paths[0].rpartition(".")[0])
            yield name, Place(component, paths, type(owner).__name__ == _SWAPPED)
            if len(paths) > 1:
                for index, path in enumerate(paths):
                    yield f"{name}_{index}", Place(component, (path,))


def _makers(part: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    for (there, here), rows in _MAKERS.get(type(part).__name__, {}).items():
        numbers = range(len(part.get_submodule(here))) if here else [None]  # type: ignore[arg-type]
        for number in numbers:
            start, own = (f"{there}.{number}.", f"{here}.{number}.") if here else ("", "")
            for name, paths in rows.items():
                yield start + name, tuple(own + path for path in paths.split())


def _sgm(path: str, unet: Any) -> str:
    """Return what Stability's own UNet calls a layer of diffusers' UNet."""
    if path in _SGM or path.count(".") < 3:
        return _SGM.get(path, path)
    block, *rest = path.split(".")
    number = 0 if block == "mid_block" else int(rest.pop(0))
    kind, index, inner = rest[0], int(rest[1]), ".".join(rest[2:])
    inner = _SGM.get(inner, inner)
    per_block = unet.config.layers_per_block + 1
    match block, kind:
        case "mid_block", _:
            return f"middle_block.{1 if kind == 'attentions' else 2 * index}.{inner}"
        case _, "downsamplers":
            return f"input_blocks.{per_block * (number + 1)}.0.op"
        case _, "upsamplers":
            after = 1 + hasattr(unet.up_blocks[number], "attentions")
            return f"output_blocks.{per_block * (number + 1) - 1}.{after}.conv"
    place = per_block * number + index + (block == "down_blocks")
    side = "input" if block == "down_blocks" else "output"
    return f"{side}_blocks.{place}.{int(kind == 'attentions')}.{inner}"
