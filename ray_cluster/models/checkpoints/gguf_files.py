"""Headers of GGUF files: quantised transformers. They are read with the package ``gguf``."""

from __future__ import annotations

import importlib.util
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.json_files import INCOMPLETE, MAX_HEADER_BYTES, head_of, opened

PLAIN_TYPES = frozenset({"F32", "F16"})
# those that diffusers reads
QUANTISED_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
    | {"IQ4_XS", "BF16"}
)
# in all arrays together: the package makes objects of each
_MAX_ELEMENTS = 1_000_000
_MAX_ENTRIES = 20_000
# the format's own limit is four
_MAX_SIDES = 8
_VERSIONS = (2, 3)
# of values, by the numbers of their types
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9


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
        _check_header(path)
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


def _check_header(path: Path) -> None:
    """Walk through a header; ValueError or struct.error where the package would not come to an end.

    It reads beyond a file's end as if there were nothing, and counts on.
    """
    with opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk = _Walk(data)
        walk.skip(len(b"GGUF"))
        if (version := walk.number("I")) not in _VERSIONS:
            raise ValueError(f"it is of version {version}, or of another byte order")
        num_tensors, num_values = walk.number("Q"), walk.number("Q")
        if max(num_tensors, num_values) > _MAX_ENTRIES:
            raise ValueError(f"it has more than {_MAX_ENTRIES} tensors or values")
        for _ in range(num_values):
            walk.skip(walk.number("Q"))
            walk.value()
        for _ in range(num_tensors):
            walk.skip(walk.number("Q"))
            if (num_sides := walk.number("I")) > _MAX_SIDES:
                raise ValueError(f"it has a tensor of {num_sides} sides")
            # these, then its type and its place
            walk.skip(8 * num_sides + 12)


@dataclass(slots=True)
class _Walk:
    """Where one is in a header; all of it lies in the file and in ``MAX_HEADER_BYTES``."""

    data: mmap.mmap
    at: int = 0
    num_elements: int = 0

    def skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > min(len(self.data), MAX_HEADER_BYTES):
            raise ValueError(f"its header ends at byte {self.at} or later")

    def number(self, kind: str) -> int:
        (found,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.skip(struct.calcsize(kind))
        return int(found)

    def value(self) -> None:
        kind, count = self.number("I"), 1
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            self.num_elements += count
            if self.num_elements > _MAX_ELEMENTS:
                raise ValueError(f"its arrays have more than {_MAX_ELEMENTS} elements")
        if kind in _WIDTHS:
            self.skip(count * _WIDTHS[kind])
        elif kind == _TEXT:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise ValueError(f"it has a value of type {kind}")
