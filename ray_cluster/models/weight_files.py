"""Which files of a diffusers folder a component is loaded from, and what their headers say.

Cheap: no weight is read, and neither torch nor diffusers is imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.checkpoints.gguf_files import gguf_tensors
from ray_cluster.models.json_files import (
    INCOMPLETE,
    MAX_HEADER_BYTES,
    head_of,
    opened,
    read_object,
    unreadable,
)

INDEX = "model_index.json"
# no image is made with them
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
# without which Stable Diffusion 3 does
T5_OF_SD3 = ("text_encoder_3", "tokenizer_3")
# variants are chosen in this order, others by name
_VARIANTS = ("fp16", "bf16", "fp32")
_LIBRARIES = ("diffusers", "transformers")
# where a checkpoint in one file has its parts: the names of their tensors begin so
UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP = ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.")
OPEN_CLIP, OPEN_CLIP_2 = "cond_stage_model.model.", "conditioner.embedders.1.model."
_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "unet": (UNET,),
    "vae": (VAE,),
    "text_encoder": (*CLIP, OPEN_CLIP),
    "text_encoder_2": (OPEN_CLIP_2,),
}
# the link to it in the folders of components whose weights it has
CHECKPOINT = "checkpoint"
_LENGTH_BYTES = 8
_MAX_TENSORS = 100_000
# three a tensor, and those in texts
_MAX_BRACKETS = 10 * _MAX_TENSORS
_MAX_SIDES = 64
# by their names in safetensors
_BITS = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "I16 U16 F16 BF16",
        32: "I32 U32 F32",
        64: "I64 U64 F64 C64",
    }.items()
    for name in names.split()
}
_SHOWN = 5
_HASHED = (".json", ".safetensors")


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a pipeline, as ``model_index.json`` names it.

    Attributes:
        library: the package that has its class.
    """

    name: str
    library: str
    class_name: str

    @property
    def has_weights(self) -> bool:
        """Whether it is a model, not a tokenizer, a scheduler or a processor of pictures."""
        others = ("tokenizer", "scheduler", "guider", "processor")
        return not any(one in self.name for one in others)

    @property
    def is_processor(self) -> bool:
        """Whether it makes pictures and texts what an encoder reads."""
        return self.name.endswith("processor")

    def weight_patterns(self, names: Collection[str]) -> Iterator[str]:
        """Yield patterns of its weights' names in a repository with files of these names."""
        own = [name for name in names if Path(name).parent.as_posix() == self.name]
        found = choose([Path(name).name for name in own], self.library)
        if found is not None:
            name, variant = found
            yield f"{self.name}/{name}"
            if name.endswith(".json"):
                # its shards
                kind = "safetensors" if ".safetensors." in name else "bin"
                yield f"{self.name}/*{'' if variant is None else variant}*.{kind}"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that a component's weights are loaded from.

    Attributes:
        variant: in their names, such as ``fp16``; None for files without.
        is_sharded: whether an index lists them.
        part: the component's folder where they are a link to a checkpoint that has its own names.
    """

    paths: tuple[Path, ...]
    variant: str | None
    is_sharded: bool
    part: Path | None = None

    @property
    def is_pickled(self) -> bool:
        """Whether they are in torch's older format, which has no header."""
        return self.paths[0].suffix not in {".safetensors", ".gguf"}

    @property
    def is_gguf(self) -> bool:
        """Whether weights are quantised, in a format that torch does not know."""
        return self.paths[0].suffix == ".gguf"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of files with a header by name.

        Raises:
            ConfigError: a file is damaged, cut or something else.
            ModelUnsupported: see :func:`ray_cluster.models.checkpoints.gguf_files.gguf_tensors`.
        """
        if self.is_gguf:
            return {name: one.shape for name, one in gguf_tensors(self.paths[0]).items()}
        found = {name: one for path in self.paths for name, one in header_shapes(path).items()}
        return {name: one for name, one in found.items() if name.startswith(self.prefixes)}

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names of its tensors begin."""
        return ("",) if self.part is None else _PREFIXES.get(self.part.name, ("",))


def components(folder: Path) -> tuple[Component, ...]:
    """Return the components that a folder's pipeline is loaded from.

    Raises:
        ConfigError: ``model_index.json`` is damaged.
        ModelUnsupported: a component comes from another library.
    """
    found = []
    for name, value in read_object(folder / INDEX).items():
        is_part = isinstance(value, list) and value and isinstance(value[0], str)
        if not is_part or name in UNUSED:
            continue
        if len(value) != 2 or not isinstance(value[1], str):
            raise ConfigError(
                f"{folder / INDEX}: {name} is {value}, not [library, class]; download it again"
            )
        if value[0] not in _LIBRARIES:
            raise ModelUnsupported(
                f"{folder.name}: {name} is made by {value[0]}; covered: {', '.join(_LIBRARIES)}"
            )
        found.append(Component(name, *value))
    return tuple(found)


def check_files(folder: Path) -> None:
    """Refuse a folder with a file that is missing, damaged or not downloaded.

    Raises:
        ConfigError: it names the file, what it is and what to do.
        ModelUnsupported: see :func:`components`.
    """
    for component in components(folder):
        place = folder / component.name
        if not place.is_dir():
            raise ConfigError(f"{folder} has no folder {component.name}: {INCOMPLETE}")
        if "tokenizer" in component.name or component.is_processor:
            # the one that is read here too; the others are their library's
            if not component.is_processor:
                read_object(place / "tokenizer_config.json")
            for path in sorted(place.iterdir()):
                if path.suffix in {".json", ".txt", ".model"}:
                    head_of(path)
        elif component.has_weights:
            read_object(place / "config.json")
            found = weight_files(folder, component)
            for path in found.paths:
                read_head = head_of if found.is_pickled else header_shapes
                (gguf_tensors if found.is_gguf else read_head)(path)
        else:
            read_object(place / f"{component.name.split('_')[-1]}_config.json")


def lacks_weights(folder: Path, component: Component) -> bool:
    """Whether there is no file that a component's weights could be loaded from."""
    names = [path.name for path in (folder / component.name).glob("*")]
    return component.has_weights and choose(names, component.library) is None


def weight_files(folder: Path, component: Component) -> WeightFiles:
    """Return the files of a component, as its library chooses them.

    Where there are none of the plain names, those of a variant are taken.

    Raises:
        ConfigError: there are none, a shard is missing, or the index is damaged.
    """
    place = folder / component.name
    names = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if links := [name for name in names if Path(name).stem == CHECKPOINT]:
        return WeightFiles((place / links[0],), None, is_sharded=False, part=place)
    found = choose(names, component.library)
    if found is None:
        wanted = f"{_stems(component.library)[0]}.safetensors"
        there = ", ".join(sorted(names)) or "nothing"
        raise ConfigError(f"{place} has no weights ({wanted}), but {there}: {INCOMPLETE}")
    name, variant = found
    if not name.endswith(".json"):
        return WeightFiles((place / name,), variant, is_sharded=False)
    shards = _shards(place / name)
    if missing := [shard for shard in shards if shard not in names]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"{place} lacks {', '.join(missing[:_SHOWN])}{more}, which {name} lists: {INCOMPLETE}"
        )
    return WeightFiles(tuple(place / shard for shard in shards), variant, is_sharded=True)


def choose(names: Collection[str], library: str) -> tuple[str, str | None] | None:
    """Return the weights file, or the index, that a component is loaded by, and its variant.

    Args:
        names: of the files in the component's folder.
    """
    stem, pickled = _stems(library)
    form = re.compile(
        rf"(?:{stem}|{pickled})\."
        r"(?:([^.-]+)\.(?:safetensors|bin)|(?:safetensors|bin)\.(?:index\.([^.]+)|([^.]+)\.index)\.json)"
    )
    variants = {next(filter(None, found.groups())) for found in map(form.fullmatch, names) if found}
    order = sorted(variants, key=lambda one: (_VARIANTS.index(one) if one in _VARIANTS else 9, one))
    for variant in (None, *order):
        for name in _candidates(library, variant):
            if name in names:
                return name, variant
    return None


def _candidates(library: str, variant: str | None) -> Iterator[str]:
    """Yield the names that a library looks for, in its order."""
    stem, pickled = _stems(library)
    dot = "" if variant is None else f".{variant}"
    single, index = f"{stem}{dot}.safetensors", f"{stem}.safetensors.index{dot}.json"
    if library == "diffusers":
        yield index
        # an older form
        yield f"{stem}.safetensors{dot}.index.json"
        yield single
        yield f"{pickled}{dot}.bin"
    else:
        yield from (single, index, f"{pickled}{dot}.bin", f"{pickled}.bin.index{dot}.json")


def _stems(library: str) -> tuple[str, str]:
    """Return how the names of a library's safetensors and pickled files begin."""
    diffusers = "diffusion_pytorch_model"
    return (diffusers, diffusers) if library == "diffusers" else ("model", "pytorch_model")


def _shards(index: Path) -> list[str]:
    """Return the files that an index lists; ConfigError if it is none."""
    content = read_object(index)
    files = content.get("weight_map")
    names = list(files.values()) if isinstance(files, dict) else []
    has_metadata = isinstance(content.get("metadata"), dict)
    if not (names and has_metadata and all(_is_name(name) for name in names)):
        raise ConfigError(
            f"{index} is no index of weights (metadata, and weight_map with a file of its folder "
            "by tensor); download it again"
        )
    return sorted(set(names))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a safetensors file by name.

    Raises:
        ConfigError: see :func:`read_header`.
    """
    return read_header(path).shapes


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself: its tensors' shapes, and words beside them."""

    shapes: dict[str, tuple[int, ...]]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        ConfigError: it is damaged, shorter or longer than its header says, too large a header's,
            or something else.
    """
    head = head_of(path)
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    try:
        with opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(_LENGTH_BYTES)
            header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise unreadable(path, error) from error
    if len(head) < _LENGTH_BYTES or len(header) < length:
        raise ConfigError(
            f"{path} is no safetensors file, or ends in its header, or that has more than "
            f"{MAX_HEADER_BYTES} bytes: {INCOMPLETE}"
        )
    try:
        metadata, tensors = _entries(header)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no safetensors file, its header is not the JSON of one ({error}): "
            f"{INCOMPLETE}"
        ) from error
    end = _LENGTH_BYTES + length + max((one.end for one in tensors.values()), default=0)
    if size != end:
        raise ConfigError(f"{path} has {size} bytes, but its header says {end}: {INCOMPLETE}")
    return Header({name: one.shape for name, one in tensors.items()}, metadata)


def _entries(header: bytes) -> tuple[dict[str, str], dict[str, _Entry]]:
    """Return what a header says beside its tensors, and these; ValueError and others for a lie.

    What safetensors would refuse is refused, and a key that is there twice.
    """
    # before they take memory
    if header.count(b"{") + header.count(b"[") > _MAX_BRACKETS:
        raise ValueError(f"it has more than {_MAX_BRACKETS} brackets")
    entries = json.loads(header.decode("utf-8"), object_pairs_hook=_once)
    metadata = entries.pop("__metadata__", None) or {}
    if not all(isinstance(one, str) for one in metadata.values()):
        raise ValueError("its __metadata__ has more than texts")
    if len(entries) > _MAX_TENSORS:
        raise ValueError(f"it has {len(entries)} tensors, more than {_MAX_TENSORS}")
    tensors = {name: _Entry.of(entry) for name, entry in entries.items()}
    end = 0
    for one in sorted(tensors.values(), key=lambda one: (one.start, one.end)):
        if one.start != end:
            raise ValueError(f"a tensor begins at byte {one.start}, the one before ends at {end}")
        end = one.end
    return metadata, tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a header.

    Attributes:
        start: of its bytes, counted from the end of the header, as is ``end``.
    """

    shape: tuple[int, ...]
    start: int
    end: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Entry:
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        # bools are ints too
        is_whole = all(type(one) is int and 0 <= one < 2**63 for one in (start, end, *shape))
        # more sides than a tensor of torch may have would make numbers without end
        if not is_whole or len(shape) > _MAX_SIDES or start > end:
            raise ValueError(f"{entry!s:.200}")
        if math.prod(shape) * _BITS[entry["dtype"]] != 8 * (end - start):
            raise ValueError(f"{entry!s:.200}: its bytes are not those of its shape")
        return cls(shape, start, end)


def folder_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every configuration and weight file, by path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _HASHED)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
