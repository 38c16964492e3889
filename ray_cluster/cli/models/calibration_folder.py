"""What calibrations share: prompts, and folders that keep images, so that they go on later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.device.gpu import number_format_here
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_MODELS
from ray_cluster.models.local import model_digest

# of no model in particular: things, people, places, light, texture and text
USUAL_PROMPTS = (
    "a red apple on a wooden table",
    "a portrait of an old man with a white beard, soft window light",
    "a mountain lake at dawn, mist over the water",
    "a street in a rainy city at night, neon signs reflected in puddles",
    "a cat asleep on a stack of books",
    "an isometric drawing of a small house with a garden",
    "a bowl of ramen with an egg, seen from above",
    "a hand-painted sign that says open",
    "a steam locomotive crossing a stone bridge in autumn",
    "two children flying a kite on a beach",
    "a close-up of a green beetle on a leaf",
    "a flat vector logo of a fox",
    "an empty concert hall with red velvet seats",
    "an astronaut riding a horse in a desert",
    "a watercolour of tulips in a glass vase",
    "a black and white photograph of a spiral staircase",
)


def prompts_in(path: Path) -> tuple[str, ...]:
    """Return the prompts of ``--prompts``, one on each line.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from None
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise ConfigError(f"--prompts {path}: no prompt in it; write one on a line")
    return found


def model_words(pool: PoolConfig) -> str:
    """Return what tells a pool's model from others: its name if it is built in, else a digest."""
    is_builtin = pool.model in BUILTIN_MODELS
    return pool.model if is_builtin else model_digest(resolve_folder(*pool.files))


def device_words(pool: PoolConfig) -> str:
    """Return where and how a pool's images are made."""
    return f"{pool.device}, {number_format_here(pool)}, {pool.num_threads} threads"


def claim(folder: Path, setting: Mapping[str, Any]) -> None:
    """Note of which images a folder is, or check that it is of these.

    Raises:
        ConfigError: it holds images of another model or setting.
    """
    text = json.dumps(setting, indent=2) + "\n"
    note = folder / "setting.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            note.write_text(text, encoding="utf-8")
        is_same = note.read_text(encoding="utf-8") == text
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error}") from None
    if not is_same:
        raise ConfigError(
            f"--out {folder}: it holds images of another model, or made with other settings (see "
            f"{note}); give another folder, or delete it"
        )


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays; the file is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(part, path)
