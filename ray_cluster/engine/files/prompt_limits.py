"""How long a prompt may be: what the tokenizers and text encoders of a folder say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.engine.files.folders import component_config, component_names, pipeline_name
from ray_cluster.errors import ConfigError
from ray_cluster.models.json_files import read_object
from ray_cluster.models.weight_files import INDEX

_T5 = "T5EncoderModel"
# to which the pipelines cut what T5 reads
_T5_TOKENS = {"StableDiffusion3Pipeline": 256}
_T5_TOKENS_OF_FLUX = 512
# transformers' way to say that a tokenizer has no limit: 1e30
_BEYOND_REASON = 1e6


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
        return dict.fromkeys(t5, _T5_TOKENS.get(pipeline, _T5_TOKENS_OF_FLUX))
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
    """Return the tokenizers of a folder with their text encoders; those without one do nothing."""
    index, names = read_object(folder / INDEX), component_names(folder)
    readers = []
    for name in names:
        encoder = name.replace("tokenizer", "text_encoder")
        if name.startswith("tokenizer") and encoder in names:
            given = read_object(folder / name / "tokenizer_config.json").get("model_max_length")
            positions = component_config(folder, encoder).get("max_position_embeddings")
            readers.append(PromptReader(name, index[encoder][1], given, positions))
    return readers


def max_prompt_tokens(folder: Path) -> int:
    """Return the most tokens of a prompt, without those that mark its ends."""
    lengths = prompt_lengths(pipeline_name(folder), prompt_readers(folder))
    return min(length - _num_marks(folder / name) for name, length in lengths.items())


def _num_marks(tokenizer: Path) -> int:
    """Return how many tokens mark the ends: T5 has none for the start."""
    return (
        1
        if "T5" in read_object(tokenizer / "tokenizer_config.json").get("tokenizer_class", "")
        else 2
    )
