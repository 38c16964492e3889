"""Finding a model and reading what its folder says of itself, before any weight is loaded.

Cheap: diffusers is imported only where a model is to be downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.errors import ConfigError, RayClusterError
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.checkpoints.folders import checkpoint_folder, transformer_folder
from ray_cluster.models.checkpoints.layouts import Prediction
from ray_cluster.models.checkpoints.names import is_single_file
from ray_cluster.models.json_files import read_object
from ray_cluster.models.local import engine_of, no_such_model
from ray_cluster.models.weight_files import INDEX, check_files, components, lacks_weights


def resolve_folder(
    model: str, prediction: Prediction | None = None, transformer: str | None = None
) -> Path:
    """Return the local folder of a model: a built-in name, a folder, a file, or a hub id.

    What a hub id names is downloaded if needed; a folder is made that stands for a file.

    Args:
        prediction: see :func:`ray_cluster.models.checkpoints.folders.checkpoint_folder`.
        transformer: a file that stands for the folder's own transformer.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    if transformer is not None:
        return transformer_folder(resolve_folder(model), transformer)
    if (folder := local_folder(model, prediction)) is not None:
        return folder
    if is_single_file(model):
        raise ConfigError(f"model {model!r}: there is no such file")
    if not is_hub_id(model):
        raise no_such_model(model)
    try:
        return _download(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} cannot be downloaded: {error}") from error


def local_folder(
    model: str, prediction: Prediction | None = None, transformer: str | None = None
) -> Path | None:
    """Return the folder of a built-in name, a folder or a file of this machine, None for others.

    Args:
        prediction: as of :func:`resolve_folder`, as is ``transformer``.

    Raises:
        ConfigError: it is a folder or a file of something else.
    """
    if transformer is not None:
        base = local_folder(model)
        return None if base is None else transformer_folder(base, transformer)
    if is_single_file(model) and Path(model).expanduser().exists():
        return checkpoint_folder(model, prediction)
    folder = builtin_folder(model) or Path(model).expanduser()
    if not folder.is_dir():
        return None
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{folder} is no diffusers folder: it has no {INDEX}")
    return folder


def resolve_single(
    model: str, builtin: Path | None, *, what: str, allowed: str, patterns: Sequence[str]
) -> Path:
    """Return the local folder of a model that is no pipeline, downloaded if needed.

    Args:
        builtin: its folder if it is a built-in one.
        what: word for what it is.
        allowed: what may be given, for the error.
        patterns: of the files that are downloaded.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    folder = builtin or Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(model):
        raise ConfigError(f"there is no {what} {model!r}: give {allowed}")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {model!r} cannot be downloaded: {error}") from error


def check_local_files(config: ClusterConfig) -> None:
    """Refuse a configuration with a model on this machine of which files are missing or damaged.

    Raises:
        ConfigError, ModelUnsupported: see :func:`ray_cluster.models.weight_files.check_files`.
    """
    for pool in config.pools:
        try:
            if (folder := local_folder(*pool.files)) is not None:
                check_files(folder)
        except RayClusterError as error:
            raise type(error)(f"pool {pool.name}: {error}") from error


def is_hub_id(model: str) -> bool:
    """Whether a name that is no folder of this machine may be a model's on the hub."""
    is_path = model.startswith((".", "/", "~")) or is_single_file(model)
    return model.count("/") == 1 and not is_path


def _download(model: str) -> Path:
    """Download the files of a hub id's pipeline; where only a variant has weights, those."""
    import huggingface_hub
    from diffusers import DiffusionPipeline

    folder = Path(DiffusionPipeline.download(model))
    if not (lacking := [one for one in components(folder) if lacks_weights(folder, one)]):
        return folder
    names = huggingface_hub.list_repo_files(model)
    patterns = [pattern for one in lacking for pattern in one.weight_patterns(names)]
    return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))


def pipeline_name(folder: Path) -> str:
    """Return the diffusers pipeline class that a folder is made for.

    For an inpainting pipeline it is the one of its family that takes text alone: they are of the
    same components, read prompts and are sampled alike.
    """
    index = folder / INDEX
    name = read_object(index).get("_class_name")
    if not isinstance(name, str):
        raise ConfigError(f"{index} has no _class_name of a pipeline; download it again")
    return text_pipeline(name)


def text_pipeline(name: str) -> str:
    """Return the text-to-image pipeline of the family of a pipeline class."""
    return name.replace("InpaintPipeline", "Pipeline")


def component_names(folder: Path) -> list[str]:
    """Return the components of a folder, those it leaves out or that no image needs not counted."""
    return [component.name for component in components(folder)]


def denoiser_name(folder: Path) -> str:
    """Return the component of a diffusers folder that predicts."""
    return "transformer" if "transformer" in component_names(folder) else "unet"


def component_config(folder: Path, component: str) -> dict[str, Any]:
    """Return the configuration of a component; the scheduler's file has a name of its own.

    Which class it is of, ``model_index.json`` says, as diffusers has it.

    Raises:
        ConfigError: the folder is incomplete.
    """
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    config = read_object(folder / component / name)
    named = [one.class_name for one in components(folder) if one.name == component]
    return config | {"_class_name": named[0]} if named else config


def is_called(pool: PoolConfig) -> bool:
    """Whether a pool's model is run call by call, by diffusers; a hub model is downloaded."""
    return engine_of(pool, pipeline_name(resolve_folder(*pool.files))) == "diffusers"
