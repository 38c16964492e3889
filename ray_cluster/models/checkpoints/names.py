"""What is a checkpoint in one file, by its name."""

from __future__ import annotations

from pathlib import Path

SAFE_SUFFIXES = (".safetensors", ".sft")
GGUF_SUFFIX = ".gguf"
_PICKLED = (".ckpt", ".pt", ".pth", ".bin")


def is_single_file(model: str) -> bool:
    """Whether a pool's model is the name of a checkpoint in one file."""
    path = Path(model).expanduser()
    return path.suffix.lower() in {*SAFE_SUFFIXES, GGUF_SUFFIX, *_PICKLED} and not path.is_dir()
