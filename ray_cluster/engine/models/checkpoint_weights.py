"""Weights of a checkpoint in one file under the names that their models have for them.

The names are converted by diffusers' own converters, which work on tensors without data as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.loaders import single_file_model, single_file_utils
from safetensors import safe_open
from torch import Tensor

from ray_cluster.compat import has_original_names
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.json_files import read_object
from ray_cluster.models.weight_files import CLIP, OPEN_CLIP, OPEN_CLIP_2, WeightFiles

# a number for each position, which half precision has spoilt in some files
_TRANSFORMER = "transformer"
_POSITIONS = "embeddings.position_ids"


def checkpoint_weights(files: WeightFiles, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a part of a checkpoint, in a number format, whatever the file's is."""
    [path] = files.paths
    with safe_open(path, framework="pt") as stored:
        names = [name for name in stored.keys() if name.startswith(files.prefixes)]  # noqa: SIM118
        found = {name: stored.get_tensor(name) for name in names}
    floating = {name: one.to(dtype) for name, one in found.items() if one.is_floating_point()}
    return renamed(files, found | floating)


def renamed(files: WeightFiles, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a part of a checkpoint under its model's names.

    Raises:
        LookupError: one is missing that the converter cannot do without.
        ConfigError: there are some that no transformer has.
        ModelUnsupported: diffusers reads none of its class from files.
    """
    assert files.part is not None, "other files have their models' names"
    config = read_object(files.part / "config.json")
    given = dict(tensors)
    if files.part.name == _TRANSFORMER:
        return _of_transformer(files.paths[0].resolve(), config, given)
    if files.part.name == "unet":
        found = single_file_utils.convert_ldm_unet_checkpoint(given, config)
    elif files.part.name == "vae":
        found = single_file_utils.convert_ldm_vae_checkpoint(given, config)
    elif any(name.startswith(CLIP) for name in given):
        found = single_file_utils.convert_ldm_clip_checkpoint(given)
        # newer versions of transformers wrote them without the first part
        found = {
            f"text_model.{name.removeprefix('text_model.')}": one for name, one in found.items()
        }
    else:
        prefix = next(one for one in (OPEN_CLIP, OPEN_CLIP_2) if next(iter(given)).startswith(one))
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=config["hidden_size"]))
        found = single_file_utils.convert_open_clip_checkpoint(model, given, prefix)
        if config["architectures"] == ["CLIPTextModel"]:
            found.pop("text_projection.weight", None)
    return {name: one for name, one in found.items() if not name.endswith(_POSITIONS)}


def load_transformer(kind: Any, files: WeightFiles, dtype: torch.dtype) -> Any:
    """Return a transformer from a file of its own; layers of GGUF stay quantised.

    Raises:
        ValueError: diffusers reads none of its class from files.
    """
    assert files.part is not None, "other transformers lie in their folders"
    options: dict[str, Any] = {}
    if files.is_gguf:
        options["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    return kind.from_single_file(
        str(files.paths[0]),
        config=str(files.part.parent),
        subfolder=_TRANSFORMER,
        dtype=dtype,
        local_files_only=True,
        **options,
    )


def _of_transformer(
    path: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    name = config["_class_name"]
    known = single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(name)
    if known is None:
        raise ModelUnsupported(f"diffusers reads no {name} from a file of its own: give a folder")
    with init_empty_weights():
        model = getattr(diffusers, name).from_config(config)
    own = model.state_dict().keys()
    if not has_original_names(model, tensors):
        return tensors
    if len(own & tensors.keys()) > len(tensors) / 2:
        # diffusers would take the names for the authors' where they are not just its own
        if others := sorted(tensors.keys() - own):
            raise ConfigError(f"{path} has {others[0]}, which no {name} of the folder has")
        return tensors
    found: dict[str, Tensor] = known["checkpoint_mapping_fn"](checkpoint=tensors, config=config)
    return found
