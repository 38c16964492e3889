"""The folder in diffusers' layout that stands for a checkpoint: configurations, and links to it.

It lies beside downloaded models (``HF_HOME``), takes 3 MB and is named by what is in it, so that
all processes of a machine share it, and a later release makes another.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ray_cluster.errors import ConfigError
from ray_cluster.models.checkpoints.clip_tokenizer import tokenizer_files
from ray_cluster.models.checkpoints.layouts import Prediction, read_layout
from ray_cluster.models.checkpoints.names import GGUF_SUFFIX, SAFE_SUFFIXES
from ray_cluster.models.weight_files import CHECKPOINT, INDEX

_NAME_CHARS = 16
_TRANSFORMER = "transformer"


def checkpoint_folder(model: str, prediction: Prediction | None = None) -> Path:
    """Return the folder that stands for a checkpoint in one file; it is made if needed.

    Args:
        prediction: what the model predicts, where the file does not say.

    Raises:
        ConfigError: the file cannot be read or is of a kind that is not covered.
    """
    path = Path(model).expanduser().absolute()
    if path.suffix.lower() == GGUF_SUFFIX:
        raise ConfigError(
            f"model {model!r} is a GGUF file, which has a transformer alone: give a folder of its "
            "kind as model, and this file as transformer"
        )
    if path.suffix.lower() not in SAFE_SUFFIXES:
        raise ConfigError(
            f"model {model!r} is a file in an older format that can run any code when it is read: "
            "take it as .safetensors"
        )
    layout = read_layout(path, prediction)
    texts = {name: json.dumps(one, indent=2) for name, one in layout.configs.items()}
    for name, pad in layout.pad_by_tokenizer.items():
        texts |= {f"{name}/{file}": text for file, text in tokenizer_files(pad).items()}
    links = {f"{part}/{CHECKPOINT}{SAFE_SUFFIXES[0]}": path for part in layout.parts}
    return _made_folder(texts, links, path.stat().st_mtime)


def transformer_folder(base: Path, transformer: str) -> Path:
    """Return the folder that stands for another one with its transformer from a file.

    Raises:
        ConfigError: the file is not there or of another kind, or the folder has no transformer.
    """
    path, config = Path(transformer).expanduser().absolute(), base / _TRANSFORMER / "config.json"
    suffix = path.suffix.lower()
    if suffix not in {*SAFE_SUFFIXES, GGUF_SUFFIX}:
        raise ConfigError(f"transformer {transformer!r} is no .safetensors and no .gguf file")
    if not path.is_file():
        raise ConfigError(f"transformer {transformer!r}: there is no such file")
    if not config.is_file():
        raise ConfigError(f"the model has no transformer to replace: leave out {transformer!r}")
    others = (one for one in base.rglob("*") if one.is_file() and one.parent != config.parent)
    links = {one.relative_to(base).as_posix(): one for one in others if one.parent != base}
    links[f"{_TRANSFORMER}/config.json"] = config
    kind = suffix if suffix == GGUF_SUFFIX else SAFE_SUFFIXES[0]
    links[f"{_TRANSFORMER}/{CHECKPOINT}{kind}"] = path
    index = (base / INDEX).read_text(encoding="utf-8")
    return _made_folder({INDEX: index}, links, path.stat().st_mtime)


def _made_folder(texts: Mapping[str, str], links: Mapping[str, Path], made_s: float) -> Path:
    """Return a folder with these files and links, made whole or not at all.

    Args:
        made_s: the time that its index is given.

    Raises:
        ConfigError: it cannot be written.
    """
    from huggingface_hub import constants

    content = json.dumps([sorted(texts.items()), sorted((a, str(b)) for a, b in links.items())])
    name = hashlib.sha256(content.encode()).hexdigest()[:_NAME_CHARS]
    place = Path(constants.HF_HOME) / "ray-cluster"
    folder = place / name
    try:
        if folder.is_dir():
            return folder
        place.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=place))
        for file, text in texts.items():
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            (draft / file).write_text(text, encoding="utf-8")
        for file, target in links.items():
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            (draft / file).symlink_to(target)
        os.utime(draft / INDEX, (made_s, made_s))
        try:
            draft.rename(folder)
        except OSError:
            # another process was faster
            shutil.rmtree(draft, ignore_errors=True)
            if not folder.is_dir():
                raise
    except OSError as error:
        raise ConfigError(
            f"the configuration of a checkpoint cannot be written to {place} ({error.strerror}): "
            "set HF_HOME to a folder of your own"
        ) from error
    return folder
