"""What a LoRA file says of its ranks and alphas beside its tensors, wherever it says it.

Programs write them as one entry of the header (diffusers, SimpleTuner), as entries of their own, or
into a file beside (PEFT). Whoever reads none of them uses the LoRA at a wrong strength.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.sources.lora_sources import PEFT_CONFIG, config_beside

Said = dict[str, Any]
"""By PEFT's names, after a component and a dot where only that is meant."""

_ENTRY = "lora_adapter_metadata"
PEFT_PREFIX = "base_model.model."
_NAMES = {
    "r": "r",
    "rank": "r",
    "lora_rank": "r",
    "network_dim": "r",
    "alpha": "lora_alpha",
    "lora_alpha": "lora_alpha",
    "network_alpha": "lora_alpha",
    "use_rslora": "use_rslora",
}
_OWN_ENTRY = re.compile(rf"(?:(\w+)\.)?({'|'.join(_NAMES)})")
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; floats of 8 bits in 32: torch computes little with them."""
    with safe_open(path, framework="pt") as file:
        keys = list(file.keys())
        return {key: _wide(file.get_tensor(key)) for key in keys}


def _wide(one: Tensor) -> Tensor:
    is_narrow = one.is_floating_point() and one.element_size() == 1
    return one.to(torch.float32) if is_narrow else one


def said_of(path: Path) -> Said:
    """Return what a file says in its header, or PEFT's configuration beside it.

    Raises:
        ModelUnsupported: two places contradict each other, or one cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
    found: Said = {}
    places: dict[str, str] = {}
    for place, said in _places(path, header):
        for key, value in said.items():
            if key in found and found[key] != value:
                raise ModelUnsupported(
                    f"it says {key} = {found[key]!r} ({places[key]}) and {value!r} ({place})"
                )
            found[key], places[key] = value, place
    return found


def _places(path: Path, header: Mapping[str, str]) -> Iterator[tuple[str, Said]]:
    if _ENTRY in header:
        yield f"header, {_ENTRY}", _object(header[_ENTRY], _ENTRY)
    own: Said = {}
    for key, text in header.items():
        if match := _OWN_ENTRY.fullmatch(key):
            prefix, name = match[1], _NAMES[match[2]]
            own[f"{prefix}.{name}" if prefix else name] = _value(key, name, text)
    yield "header", own
    config = config_beside(path)
    if config.is_file():
        yield PEFT_CONFIG, _object(config.read_bytes(), PEFT_CONFIG)


def _object(text: str | bytes, place: str) -> Said:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ModelUnsupported(f"{place} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelUnsupported(f"{place} is no object of JSON")
    return found


def _value(key: str, name: str, text: str) -> Any:
    try:
        if name == "use_rslora":
            return _TRUTH[text.strip().lower()]
        number = float(text)
        if name == "lora_alpha":
            return number
        if number < 1 or not number.is_integer():
            raise ValueError(text)
        return int(number)
    except (KeyError, ValueError, OverflowError):
        raise ModelUnsupported(f"its header has {key} = {text[:40]!r}, which is none") from None


def spread(said: Said, ranks: Mapping[str, Collection[int]]) -> Said | None:
    """Return what is said for each component, as diffusers reads it; None if nothing is.

    Args:
        said: as of :func:`said_of`.
        ranks: those of each component's factors.

    Raises:
        ModelUnsupported: an alpha has no rank that it belongs to, or a component's own entry
            contradicts that of all.
    """
    whole: Said = {key: value for key, value in said.items() if key.partition(".")[0] in ranks}
    for key, value in said.items():
        if "." in key:
            continue
        for component in ranks:
            own = f"{component}.{key}"
            if whole.setdefault(own, value) != value:
                raise ModelUnsupported(f"it says {own} = {whole[own]!r} and {key} = {value!r}")
    for component, found in ranks.items():
        if f"{component}.lora_alpha" in whole and f"{component}.r" not in whole:
            if len(found) != 1:
                raise ModelUnsupported(
                    f"it says one alpha for its {component}, and no rank: its factors have {found}"
                )
            [whole[f"{component}.r"]] = found
    return whole or None
