"""Finding a model and reading what its folder says of itself, before any weight is loaded.

Cheap: diffusers is imported only where a model is to be downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.local import no_such_model

_T5 = "T5EncoderModel"
# to which the pipelines cut what T5 reads
_T5_TOKENS = {"StableDiffusion3Pipeline": 256, "FluxPipeline": 512}
# transformers' way to say that a tokenizer has no limit: 1e30
_BEYOND_REASON = 1e6


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


@dataclass(frozen=True, slots=True)
class PromptReader:
    """A tokenizer and the text encoder behind it.

    Attributes:
        name: of the tokenizer's component.
        encoder: class of the text encoder.
        given: ``model_max_length`` of the tokenizer; None, or a number beyond all reason, where its
            files do not say.
        positions: ``max_position_embeddings`` of the text encoder; None for T5, which has no limit.
    """

    name: str
    encoder: str
    given: float | None
    positions: int | None


def prompt_lengths(pipeline: str, readers: Sequence[PromptReader]) -> dict[str, int]:
    """Return the tokenizers whose limit counts, with the most tokens that each may make.

    Those that mark the ends are among them. Where a T5 encoder reads the prompt, all of it counts
    only there: the pipelines cut what CLIP reads.
    """
    t5 = [reader.name for reader in readers if reader.encoder == _T5]
    if t5:
        return dict.fromkeys(t5, _T5_TOKENS[pipeline])
    return {reader.name: clip_length(reader.given, reader.positions) for reader in readers}


def clip_length(given: float | None, positions: int | None) -> int:
    """Return the most tokens of a CLIP text encoder and its tokenizer, at least one of them known.

    Raises:
        ConfigError: neither is.
    """
    known = [one for one in (given, positions) if one is not None and one < _BEYOND_REASON]
    if not known:
        raise ConfigError(
            "neither model_max_length in a tokenizer_config.json nor max_position_embeddings in "
            "its text encoder's config.json says how long a prompt may be; add one of them"
        )
    return int(min(known))


def prompt_readers(folder: Path) -> list[PromptReader]:
    """Return the tokenizers of a folder with their text encoders."""
    index = _read(folder / "model_index.json")
    readers = []
    for name in component_names(folder):
        if name.startswith("tokenizer"):
            encoder = name.replace("tokenizer", "text_encoder")
            given = _read(folder / name / "tokenizer_config.json").get("model_max_length")
            positions = component_config(folder, encoder).get("max_position_embeddings")
            readers.append(PromptReader(name, index[encoder][1], given, positions))
    return readers


def max_prompt_tokens(folder: Path) -> int:
    """Return the most tokens of a prompt, without those that mark its ends."""
    lengths = prompt_lengths(pipeline_name(folder), prompt_readers(folder))
    return min(length - _num_marks(folder / name) for name, length in lengths.items())


def _num_marks(tokenizer: Path) -> int:
    """Return how many tokens mark the ends: T5 has none for the start."""
    return 1 if "T5" in _read(tokenizer / "tokenizer_config.json").get("tokenizer_class", "") else 2


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
