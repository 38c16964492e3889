"""The LoRAs that ``generate --lora`` names: of a service, built-in ones, or files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_cluster.errors import ConfigError, InvalidRequest
from ray_cluster.models.builtin import BUILTIN_PARTS, weights_folder
from ray_cluster.models.sources.lora_sources import only_file

_SUFFIX = ".safetensors"
# of the LoRAs that ship with the package
_FILE = "pytorch_lora_weights.safetensors"


class LocalLora(NamedTuple):
    """A LoRA for images that are made in this process."""

    name: str
    path: Path
    scale: float


def parse_loras(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return what options like ``pastel:0.8`` mean, as the API has it.

    Raises:
        InvalidRequest: a scale is no finite number.
    """
    return [_parsed(text) for text in texts]


def _parsed(text: str) -> dict[str, Any]:
    name, colon, scale = text.rpartition(":")
    if not colon:
        return {"name": text}
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise InvalidRequest(
            f"--lora {text!r} is no LoRA with a scale; write NAME or NAME:SCALE, such as "
            "pastel:0.8.",
            "loras",
        )
    return {"name": name, "scale": value}


def loras_of_recipe(text: str) -> list[dict[str, Any]]:
    """Return the LoRAs of a recipe, as the API has them; raises ValueError for anything else."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{text!r} is no list of LoRAs")
    return found


def check_names(loras: Sequence[Mapping[str, Any]]) -> None:
    """Refuse files where a service makes the images: it knows LoRAs by their names.

    Raises:
        ConfigError: one of them is a file.
    """
    for one in loras:
        if _is_file(str(one["name"])):
            raise ConfigError(
                f"--lora {one['name']} is a file, and a service knows LoRAs by name; register it "
                "with 'ray-cluster loras add', or use it here, without --url and RAY_CLUSTER_URL"
            )


def local_loras(loras: Sequence[Mapping[str, Any]]) -> tuple[LocalLora, ...]:
    """Return the files of LoRAs that are valid otherwise.

    Raises:
        ConfigError: one is neither built-in nor a file of safetensors.
        InvalidRequest: one is named twice.
    """
    found = tuple(_local(one) for one in loras)
    paths = [one.path for one in found]
    for one in found:
        if paths.count(one.path) > 1:
            raise InvalidRequest(
                f"The parameter 'loras' names {one.name!r} twice; name each LoRA once, with the "
                "scale that it is to have.",
                "loras",
            )
    return found


def _local(lora: Mapping[str, Any]) -> LocalLora:
    name, scale = str(lora["name"]), lora.get("scale")
    weight = 1.0 if scale is None else float(scale)
    if BUILTIN_PARTS.get(name) == "LoRA":
        return LocalLora(name, weights_folder() / name / _FILE, weight)
    if not _is_file(name):
        builtin = ", ".join(one for one, kind in BUILTIN_PARTS.items() if kind == "LoRA")
        raise ConfigError(
            f"--lora {name}: there is no such LoRA in this process; built-in are {builtin}. Give "
            f"one of these, the path of a {_SUFFIX} file (./NAME for one here) or of a folder with "
            "one, or --url for a service that has it"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        path /= only_file([one.name for one in path.iterdir()], name)
    if not path.is_file():
        raise ConfigError(f"--lora {name}: there is no such file")
    if path.suffix != _SUFFIX:
        raise ConfigError(
            f"--lora {name} is no {_SUFFIX} file; other formats can hold programs and are not read"
        )
    return LocalLora(name, path, weight)


def _is_file(name: str) -> bool:
    return "/" in name or name.endswith(_SUFFIX)
