"""Models of a folder as wholes: every weight that a model has must be in its files.

Libraries fill what is missing with random numbers, or leave it out. It is found before a weight is
read: the models are built without data, and given tensors without data of the shapes that the
files' headers say, through the library's own conversion of names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from torch import Tensor

from ray_cluster.compat import rename_old_weights
from ray_cluster.engine.files.folders import pipeline_name
from ray_cluster.engine.models.checkpoint_weights import (
    checkpoint_weights,
    load_transformer,
    renamed,
)
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.json_files import INCOMPLETE, head_of, read_object
from ray_cluster.models.weight_files import (
    INDEX,
    T5_OF_SD3,
    UNUSED,
    Component,
    WeightFiles,
    check_files,
    components,
    header_shapes,
    weight_files,
)

_META = torch.device("meta")
_TRANSFORMERS = "transformers"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Unmatched:
    """Names of weights of a model that its files do not have, and of those of other shapes."""

    missing: Collection[str] = ()
    mismatched: Collection[str] = ()

    @classmethod
    def reported(cls, info: dict[str, Any]) -> _Unmatched:
        """Return what the loading report of transformers says."""
        return cls(info["missing_keys"], [name for name, *_ in info["mismatched_keys"]])


def check_models(folder: Path) -> None:
    """Refuse a folder that cannot be loaded whole, without reading a weight.

    Raises:
        ConfigError: a file is missing or damaged, or lacks weights of its model; names them.
        ModelUnsupported: a component's class or number format is not covered.
    """
    check_files(folder)
    found = components(folder)
    parameters = inspect.signature(getattr(diffusers, pipeline_name(folder)).__init__).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty}
    if lacking := needed - {one.name for one in found} - {"self", *UNUSED, *T5_OF_SD3}:
        raise ConfigError(f"{folder / INDEX} names no {', '.join(sorted(lacking))}: {INCOMPLETE}")
    names = {one.name for one in found}
    for encoder in sorted(one for one in names if one.startswith("text_encoder")):
        if (tokenizer := encoder.replace("text_encoder", "tokenizer")) not in names:
            raise ConfigError(f"{folder / INDEX} has {encoder}, but no {tokenizer}: {INCOMPLETE}")
    for component in found:
        if component.has_weights:
            _check_weights(folder, component)
        elif component.name.startswith("tokenizer"):
            _check_tokenizer(folder, component)


def check_transformer(folder: Path) -> None:
    """Refuse a transformer that has not all weights of its class, likewise."""
    for component in components(folder):
        if component.name == "transformer":
            _check_weights(folder, component)


def load_models(
    folder: Path, dtype: torch.dtype, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the loaded models of a folder by the names of their components.

    Args:
        only: names of those that are loaded; None for all.

    Raises:
        ConfigError, ModelUnsupported: see :func:`check_models`.
    """
    found = {}
    for component in components(folder):
        if component.has_weights and (only is None or component.name in only):
            files = weight_files(folder, component)
            found[component.name], unmatched = _load(folder, component, files, dtype)
            _refuse(folder, component, files, unmatched)
    return found


def load_whole(
    folder: Path, class_name: str, dtype: torch.dtype, library: str = _TRANSFORMERS
) -> Any:
    """Return a model whose files lie in the folder itself, ready for inference.

    Raises:
        ConfigError, ModelUnsupported: see :func:`check_models`.
    """
    component = Component(".", library, class_name)
    # the class is looked for before the weights are
    component_class(folder, component)
    for path in (files := weight_files(folder, component)).paths:
        head_of(path) if files.is_pickled else header_shapes(path)
    _check_weights(folder, component)
    model, unmatched = _load(folder, component, files, dtype)
    _refuse(folder, component, files, unmatched)
    return model.requires_grad_(False).eval()


def stored_tensors(files: WeightFiles) -> dict[str, Tensor]:
    """Return tensors without data, as many and as large as those in weights files, by name.

    Raises:
        ConfigError: a file is damaged.
    """
    if not files.is_pickled:
        stored = {name: torch.empty(one, device=_META) for name, one in files.shapes().items()}
        return stored if files.part is None else renamed(files, stored)
    found: dict[str, Tensor] = {}
    for path in files.paths:
        try:
            content = torch.load(path, map_location=_META, weights_only=True)
            found |= {name: one for name, one in content.items() if isinstance(one, Tensor)}
        # torch passes on what the pickle raises, UnpicklingError and EOFError among others
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be read ({first_line(error)}): {INCOMPLETE}"
            ) from error
    return found


def _check_weights(folder: Path, component: Component) -> None:
    config = read_object(folder / component.name / "config.json")
    if config.get("quantization_config"):
        raise ModelUnsupported(
            f"{folder.name}: {component.name} has quantised weights (quantization_config in its "
            "config.json), which the step engine does not cover; set engine: diffusers, or take a "
            "folder with the full ones"
        )
    files, kind = weight_files(folder, component), component_class(folder, component)
    try:
        stored = stored_tensors(files)
    except IndexError as error:
        names = "its tensors have other names than those of a"
        raise ConfigError(f"{files.paths[0].resolve()}: {names} {component.class_name}") from error
    except LookupError as error:
        raise ConfigError(f"{files.paths[0].resolve()} lacks {error}: {INCOMPLETE}") from error
    try:
        if component.library == "diffusers":
            unmatched = _unmatched(kind, config, files, stored)
        else:
            unmatched = _unmatched_of_transformers(kind, folder / component.name, stored)
    # the libraries have classes of their own for a configuration's wrong values
    except Exception as error:
        raise ConfigError(
            f"{folder / component.name / 'config.json'} does not suit a {component.class_name} "
            f"({first_line(error)}); download it again"
        ) from error
    _refuse(folder, component, files, unmatched)


def _unmatched(
    kind: Any, config: dict[str, Any], files: WeightFiles, stored: dict[str, Tensor]
) -> _Unmatched:
    with init_empty_weights():
        model = kind.from_config(config)
    if not files.is_sharded:
        # as its from_pretrained does: names of attention layers from before shards were known
        rename_old_weights(model, stored)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return _Unmatched(
        [name for name in wanted if name not in stored],
        [name for name, one in stored.items() if one.shape != wanted.get(name, one.shape)],
    )


def _unmatched_of_transformers(kind: Any, place: Path, stored: dict[str, Tensor]) -> _Unmatched:
    # the library knows what is tied to another weight, or not stored
    _, info = kind.from_pretrained(
        None,
        config=kind.config_class.from_pretrained(place, local_files_only=True),
        state_dict=stored,
        device_map=_META.type,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return _Unmatched.reported(info)


def _load(
    folder: Path, component: Component, files: WeightFiles, dtype: torch.dtype
) -> tuple[Any, _Unmatched]:
    if files.part is not None:
        return _load_part(component_class(folder, component), component, files, dtype)
    is_diffusers = component.library == "diffusers"
    options: dict[str, Any] = {"torch_dtype" if is_diffusers else "dtype": dtype}
    if files.variant is not None:
        options["variant"] = files.variant
    if files.is_pickled:
        # the library would report at first that it misses the others
        options["use_safetensors"] = False
    model, info = component_class(folder, component).from_pretrained(
        folder / component.name, local_files_only=True, output_loading_info=True, **options
    )
    if is_diffusers:
        # its report goes by the index; what no file had is still without data
        return model, _Unmatched([name for name, one in model.state_dict().items() if one.is_meta])
    return model, _Unmatched.reported(info)


def _load_part(
    kind: Any, component: Component, files: WeightFiles, dtype: torch.dtype
) -> tuple[Any, _Unmatched]:
    """Load a component from a checkpoint that has others beside it."""
    assert files.part is not None, "its caller has looked"
    if component.name == "transformer":
        model = load_transformer(kind, files, dtype)
        return model, _Unmatched([name for name, one in model.state_dict().items() if one.is_meta])
    weights = checkpoint_weights(files, dtype)
    if component.library == "diffusers":
        with init_empty_weights():
            model = kind.from_config(read_object(files.part / "config.json"))
        missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
        return model.eval(), _Unmatched(missing)
    model, info = kind.from_pretrained(
        None,
        config=kind.config_class.from_pretrained(files.part, local_files_only=True),
        state_dict=weights,
        dtype=dtype,
        output_loading_info=True,
    )
    return model, _Unmatched.reported(info)


def _refuse(folder: Path, component: Component, files: WeightFiles, unmatched: _Unmatched) -> None:
    """Refuse a component of which weights are missing or have other shapes."""
    reasons = []
    if unmatched.missing:
        reasons.append(f"lacks {_some(unmatched.missing)}")
    if unmatched.mismatched:
        reasons.append(f"has other shapes than its config.json for {_some(unmatched.mismatched)}")
    if reasons:
        name = files.paths[0].name if len(files.paths) == 1 else f"{len(files.paths)} shards"
        name = name if files.part is None else str(files.paths[0].resolve())
        if files.part is not None and component.name == "transformer":
            raise ConfigError(
                f"{name} {' and '.join(reasons)}: it is of another model than the folder, whose "
                f"transformer is a {component.class_name}, or incomplete; take the one that belongs"
            )
        raise ConfigError(
            f"{folder / component.name}: {name} {' and '.join(reasons)}, so its "
            f"{component.class_name} would be filled with random numbers: {INCOMPLETE}, or save it "
            "with the versions of diffusers and transformers that are installed here"
        )


def _some(found: Collection[str]) -> str:
    names = sorted(found)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _check_tokenizer(folder: Path, component: Component) -> None:
    try:
        component_class(folder, component).from_pretrained(
            folder / component.name, local_files_only=True
        )
    # the tokenizers library raises Exception itself for a damaged file
    except Exception as error:
        if isinstance(error, ModelUnsupported):
            raise
        raise ConfigError(
            f"{folder / component.name} cannot be loaded ({first_line(error)}): {INCOMPLETE}"
        ) from error


def component_class(folder: Path, component: Component) -> Any:
    """Return the class of a component; ModelUnsupported if the installed library has none."""
    library = importlib.import_module(component.library)
    found = getattr(library, component.class_name, None)
    if not hasattr(found, "from_pretrained"):
        raise ModelUnsupported(
            f"{folder.name}: {component.name} is a {component.class_name}, which the installed "
            f"{component.library} {library.__version__} does not have"
        )
    return found


def first_line(error: Exception) -> str:
    """Return what an error says in one line: its class if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
