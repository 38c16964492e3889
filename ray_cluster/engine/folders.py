"""Finding a model and reading what its folder says of itself, before any weight is loaded.

Cheap: diffusers is imported only where a model is to be downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.local import no_such_model


def resolve_folder(model: str) -> Path:
    """Return the local folder of a built-in name, a folder or a hub id (downloaded if needed).

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    folder = builtin_folder(model) or Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise ConfigError(f"{folder} is no diffusers folder: it has no model_index.json")
        return folder
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise no_such_model(model)
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} cannot be downloaded: {error}") from error


def pipeline_name(folder: Path) -> str:
    """Return the diffusers pipeline class that a folder is made for."""
    return str(_read(folder / "model_index.json")["_class_name"])


def component_names(folder: Path) -> list[str]:
    """Return the components of a folder, those it leaves out not counted."""
    index = _read(folder / "model_index.json")
    return [name for name, value in index.items() if isinstance(value, list) and value[0]]


def component_config(folder: Path, component: str) -> dict[str, Any]:
    """Return the configuration of a component; the scheduler's file has a name of its own.

    Raises:
        ConfigError: the folder is incomplete.
    """
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return _read(folder / component / name)


def max_prompt_tokens(folder: Path) -> int:
    """Return the most tokens of a prompt, without the two that mark its ends."""
    lengths = [
        _read(folder / name / "tokenizer_config.json")["model_max_length"]
        for name in component_names(folder)
        if name.startswith("tokenizer")
    ]
    return int(min(lengths)) - 2


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): the model is incomplete"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return content
