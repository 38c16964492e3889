"""Checkpoints in one file: how each becomes a folder that can be served."""

from __future__ import annotations

from pathlib import Path

from ray_cluster.errors import ConfigError
from ray_cluster.models.weight_files import header_shapes

_SUFFIXES = {".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf"}
# a part of a tensor's name that only files of one family have
_PIPELINE_BY_PART = {
    "joint_blocks.": "StableDiffusion3Pipeline",
    "double_blocks.": "FluxPipeline",
    "conditioner.": "StableDiffusionXLPipeline",
    "cond_stage_model.": "StableDiffusionPipeline",
}


def is_single_file(model: str) -> bool:
    """Whether a pool's model is the name of a checkpoint in one file."""
    path = Path(model).expanduser()
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


def check_is_folder(model: str) -> None:
    """Refuse a checkpoint in one file.

    Its configuration and its tokenizers are not in it: diffusers fetches them from the hub, so it
    is converted once, not at every start of every replica.

    Raises:
        ConfigError: it shows the command that makes a folder of it.
    """
    if not is_single_file(model):
        return
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        raise ConfigError(
            f"model {model!r} is a GGUF file: quantised weights are not covered; give a folder in "
            "diffusers' layout, or a hub id"
        )
    folder = path.with_suffix("")
    raise ConfigError(
        f"model {model!r} is a single file; a folder in diffusers' layout is needed. Where the hub "
        f'can be reached, this makes one: python -c "from diffusers import {_pipeline(path)} as P; '
        f"P.from_single_file('{path}').save_pretrained('{folder}')\"; then give '{folder}'"
    )


def _pipeline(path: Path) -> str:
    """Return the pipeline of a file; where that is not seen, that of most."""
    try:
        names = header_shapes(path)
    except ConfigError:
        names = {}
    found = (kind for part, kind in _PIPELINE_BY_PART.items() if any(part in one for one in names))
    return next(found, "StableDiffusionPipeline")
