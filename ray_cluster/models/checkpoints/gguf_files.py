"""Headers of GGUF files: quantised transformers. They are read with the package ``gguf``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.json_files import INCOMPLETE, head_of

PLAIN_TYPES = frozenset({"F32", "F16"})
# those that diffusers reads
QUANTISED_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
    | {"IQ4_XS", "BF16"}
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the header.

    Attributes:
        shape: once it is no longer quantised.
        kind: its type, such as ``Q4_0``.
        num_bytes: in the file.
    """

    shape: tuple[int, ...]
    kind: str
    num_bytes: int

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are in blocks."""
        return self.kind not in PLAIN_TYPES


def gguf_tensors(path: Path) -> Mapping[str, GgufTensor]:
    """Return the tensors of a GGUF file by name, without reading one.

    Raises:
        ConfigError: the file is damaged or cut, or the package is not there.
        ModelUnsupported: it has a type that diffusers does not read.
    """
    if not head_of(path).startswith(b"GGUF"):
        raise ConfigError(f"{path.resolve()} is no GGUF file: {INCOMPLETE}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{path.resolve()} is read with the package gguf, which is not installed: "
            "pip install 'ray-cluster[gguf]'"
        )
    import gguf

    try:
        stored = gguf.GGUFReader(path).tensors
    # a damaged header makes all kinds of errors in that package
    except Exception as error:
        raise ConfigError(f"{path.resolve()} cannot be read ({error}): {INCOMPLETE}") from error
    found = {
        # its shapes begin with the last side
        one.name: GgufTensor(
            tuple(map(int, reversed(one.shape))), one.tensor_type.name, int(one.n_bytes)
        )
        for one in stored
    }
    if others := {one.kind for one in found.values()} - PLAIN_TYPES - QUANTISED_TYPES:
        raise ModelUnsupported(
            f"{path.resolve()} has weights of type {', '.join(sorted(others))}; covered: "
            f"{', '.join(sorted(PLAIN_TYPES | QUANTISED_TYPES))}"
        )
    if wrong := [name for name, one in found.items() if one.is_quantised and len(one.shape) != 2]:
        raise ModelUnsupported(f"{path.resolve()} has {wrong[0]} quantised, which is no matrix")
    return found
