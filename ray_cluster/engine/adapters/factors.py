"""A LoRA's factors in one file, which processes of a node map without a copy.

The file is safetensors: two tensors a layer, and in its metadata what convolutions need to know.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ray_cluster.engine.adapters.lora_files import LoraFactors
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.errors import MODEL_ERRORS, ModelUnsupported

_VERSION = "1"
_FILE_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, SafetensorError)
_SHRINK, _EXPAND = ":shrink", ":expand"


class FactorsUnreadable(ModelUnsupported):
    """A file of factors is missing, damaged, or of another version.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path.name} is no whole file of factors: {reason}")
        self.path = path


def write_factors(factors: LoraFactors, path: Path) -> None:
    """Write factors to a file, whole or not at all.

    Raises:
        OSError: the disk is full.
    """
    tensors, convolutions = {}, {}
    for component, layers in factors.by_component.items():
        for layer, one in layers.items():
            name = f"{component}:{layer}"
            tensors[name + _SHRINK] = one.shrink.contiguous()
            tensors[name + _EXPAND] = one.expand.contiguous()
            if one.shrink.ndim == 4:
                convolutions[name] = [one.stride, one.padding]
    metadata = {"version": _VERSION, "convolutions": json.dumps(convolutions)}
    number, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
    os.close(number)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def open_factors(path: Path) -> LoraFactors:
    """Return the factors in a file of :func:`write_factors`, mapped.

    Raises:
        FactorsUnreadable: it is missing, damaged, or of another version.
    """
    found: dict[str, dict[str, LowRank]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != _VERSION:
                raise FactorsUnreadable(path, f"its version is {metadata.get('version')}")
            convolutions = json.loads(metadata["convolutions"])
            for key in file.keys():  # noqa: SIM118
                if not key.endswith(_SHRINK):
                    continue
                name = key.removesuffix(_SHRINK)
                component, _, layer = name.partition(":")
                shape = convolutions.get(name, [(1, 1), (0, 0)])
                stride, padding = (tuple(one) for one in shape)
                factors = file.get_tensor(key), file.get_tensor(name + _EXPAND)
                found.setdefault(component, {})[layer] = LowRank(*factors, stride, padding)
    except _FILE_ERRORS as error:
        raise FactorsUnreadable(path, error) from error
    return LoraFactors(found)
