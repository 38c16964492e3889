"""Reads LoRA files: safetensors of PEFT, diffusers, kohya (linear and LoCon), ComfyUI, OneTrainer,
ai-toolkit, SimpleTuner and XLabs.

Every key of a file is that of a layer of its base, by any of the layer's names, or the file is
refused by name: diffusers would drop some with a warning, and others in silence. Each layer has its
own alpha: diffusers 0.42 takes the commonest for most of them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.adapters.skeleton import Skeleton
from ray_cluster.errors import MODEL_ERRORS, ModelUnsupported

_NUM_NAMED = 3
_NUM_SKELETONS = 4
_MAX_REASON = 300
_SUFFIX = ".safetensors"
_FILE_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, SafetensorError)
_READ_ERRORS: tuple[type[Exception], ...] = (*_FILE_ERRORS, ModelUnsupported)
# parts of keys -> the kind of adapter that has them
_OTHER_KINDS = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lora_mid": "Tucker (LoCon with a middle factor)",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "boft_": "BOFT",
    "oft_": "OFT",
    "on_input": "IA3",
    ".a1.weight": "GLoRA",
    ".w_norm": "LoRA of norms (LyCORIS)",
    ".scalar": "LyCORIS with a trained scalar",
    "lora_E": "AdaLoRA",
    "vera_lambda": "VeRA",
    "query_norm.scale": "control-LoRA of FLUX (Black Forest Labs)",
    "lora_controlnet": "control-LoRA",
    "lora_B.bias": "LoRA with biases",
    "lora_up.bias": "LoRA with biases",
    "lora_embedding_": "LoRA of embeddings",
    ".diff": "full differences of weights",
}
# keys of what teaches text encoders new words, beside a LoRA or alone
_NEW_WORDS = re.compile(
    r"bundle_emb\..*|(?:.*\.)?(?:string_to_param|emb_params)(?:\..*)?|clip_[lg]|t5(?:xxl)?"
    r"|text_encoders_\d"
)


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The factors of a LoRA.

    Attributes:
        by_component: by component of the base's folder (``unet``, ``text_encoder``, ...), then by
            the path of the layer in it.
    """

    by_component: Mapping[str, Mapping[str, LowRank]]

    @property
    def layers(self) -> Iterator[LowRank]:
        """Of all components."""
        return (one for part in self.by_component.values() for one in part.values())

    @property
    def num_layers(self) -> int:
        """Layers that it changes."""
        return sum(map(len, self.by_component.values()))

    @property
    def num_bytes(self) -> int:
        """Of all factors."""
        return sum(one.num_bytes for one in self.layers)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Different ranks of its layers, in rising order."""
        return tuple(sorted({one.rank for one in self.layers}))

    @property
    def changes_prompts(self) -> bool:
        """Whether it changes layers of text encoders."""
        return any(name.startswith("text_encoder") for name in self.by_component)


class LoraReader:
    """Reads LoRA files, and keeps the skeletons of the last few bases: building one takes a second.

    One thread may use it at a time.
    """

    def __init__(self) -> None:
        self._skeletons: OrderedDict[Path, Skeleton] = OrderedDict()

    def read(self, path: Path, base: Path) -> LoraFactors:
        """Return the factors of a LoRA file for a model.

        Args:
            path: a safetensors file.
            base: the diffusers folder of the model.

        Raises:
            ModelUnsupported: it is no whole safetensors file, another kind of adapter, or made for
                another model; it names the first keys that are wrong.
        """
        _check_file(path)
        skeleton = self._skeletons.pop(base, None) or Skeleton(base)
        self._skeletons[base] = skeleton
        while len(self._skeletons) > _NUM_SKELETONS:
            self._skeletons.popitem(last=False)
        try:
            found = skeleton.read(path)
        except _READ_ERRORS as error:
            words = _words_of(error)
            raise ModelUnsupported(f"{path.name} does not fit {base.name}: {words}") from error
        factors = LoraFactors(found.by_component)
        if found.unused or factors.num_layers == 0:
            raise ModelUnsupported(
                f"{path.name} is made for another model: {base.name} has no layer for "
                f"{len(found.unused)} of its keys, such as {list(found.unused[:_NUM_NAMED])}, and "
                f"{factors.num_layers} layers for the others"
            )
        _check_finite(path, found.by_component)
        return factors


def _words_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:_MAX_REASON] or type(error).__name__


def read_lora(path: Path, base: Path) -> LoraFactors:
    """Return the factors of one LoRA file; see :meth:`LoraReader.read`."""
    return LoraReader().read(path, base)


def _check_file(path: Path) -> None:
    if path.suffix.lower() != _SUFFIX:
        raise ModelUnsupported(
            f"{path.name} is no {_SUFFIX} file; other formats can hold programs and are not read"
        )
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            _check_kind(path, keys)
            # one at a time: the file may be large
            bad = [key for key in keys if not _is_finite(_number(path, key, file))]
    except _FILE_ERRORS as error:
        raise ModelUnsupported(f"{path.name} cannot be read as safetensors: {error}") from error
    if bad:
        raise ModelUnsupported(f"{path.name} has NaN or infinite factors: {bad[:_NUM_NAMED]}")


def _check_kind(path: Path, keys: list[str]) -> None:
    for part, kind in _OTHER_KINDS.items():
        found = [key for key in keys if part in key]
        if found:
            raise ModelUnsupported(
                f"{path.name} is a {kind} adapter ({found[0]}), which is not covered; covered are "
                "LoRAs of linear layers and convolutions"
            )
    if words := [key for key in keys if _NEW_WORDS.fullmatch(key)]:
        raise ModelUnsupported(
            f"{path.name} has embeddings of new words for prompts ({words[0]}; pivotal tuning or "
            "textual inversion), which are not covered; covered are LoRAs of layers, in files that "
            "hold nothing else"
        )
    if not any("lora" in key for key in keys):
        raise ModelUnsupported(
            f"{path.name} has no LoRA keys; its first are {list(keys)[:_NUM_NAMED]}"
        )


def _number(path: Path, key: str, file: Any) -> Tensor:
    one: Tensor = file.get_tensor(key)
    if one.is_complex():
        raise ModelUnsupported(f"{path.name} has complex numbers in {key}")
    return one


def _is_finite(one: Tensor) -> bool:
    return bool(torch.isfinite(one.float()).all())


def _check_finite(path: Path, found: Mapping[str, Mapping[str, LowRank]]) -> None:
    """Refuse what became infinite by its alpha, or by its number format."""
    bad = [
        f"{name}.{layer}"
        for name, layers in found.items()
        for layer, one in layers.items()
        if not (_is_finite(one.shrink) and _is_finite(one.expand))
    ]
    if bad:
        raise ModelUnsupported(
            f"{path.name} has NaN or infinite factors with its alphas: {bad[:_NUM_NAMED]}"
        )
