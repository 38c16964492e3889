"""Which files of a diffusers folder a component is loaded from, and what their headers say.

Cheap: no weight is read, and neither torch nor diffusers is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.json_files import INCOMPLETE, check_head, head_of, read_object, unreadable

INDEX = "model_index.json"
# no image is made with them
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
# without which Stable Diffusion 3 does
T5_OF_SD3 = ("text_encoder_3", "tokenizer_3")
# variants are chosen in this order, others by name
_VARIANTS = ("fp16", "bf16", "fp32")
_LIBRARIES = ("diffusers", "transformers")
_LENGTH_BYTES = 8
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
        return not (self.name.startswith(("tokenizer", "scheduler")) or self.is_processor)

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
    """

    paths: tuple[Path, ...]
    variant: str | None
    is_sharded: bool

    @property
    def is_pickled(self) -> bool:
        """Whether they are in torch's older format, which has no header."""
        return self.paths[0].suffix != ".safetensors"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of safetensors files by name.

        Raises:
            ConfigError: a file is damaged, cut or something else.
        """
        return {name: shape for path in self.paths for name, shape in header_shapes(path).items()}


def components(folder: Path) -> tuple[Component, ...]:
    """Return the components that a folder's pipeline is loaded from.

    Raises:
        ConfigError: ``model_index.json`` is damaged.
        ModelUnsupported: a component comes from another library.
    """
    found = []
    for name, value in read_object(folder / INDEX).items():
        if not isinstance(value, list) or not value or value[0] is None or name in UNUSED:
            continue
        if len(value) != 2 or not all(isinstance(part, str) for part in value):
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
        if component.name.startswith("tokenizer") or component.is_processor:
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
                head_of(path) if found.is_pickled else header_shapes(path)
        else:
            read_object(place / "scheduler_config.json")


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
        ConfigError: it is damaged, shorter or longer than its header says, or something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length_bytes = file.read(_LENGTH_BYTES)
            length = int.from_bytes(length_bytes, "little")
            # never more than there is, whatever the length says
            header = file.read(min(length, size))
    except OSError as error:
        raise unreadable(path, error) from error
    check_head(path, length_bytes + header)
    if len(length_bytes) < _LENGTH_BYTES or len(header) < length:
        raise ConfigError(f"{path} is no safetensors file, or ends in its header: {INCOMPLETE}")
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _Entry.of(entry) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no safetensors file, its header is not the JSON of one ({error}): "
            f"{INCOMPLETE}"
        ) from error
    end = _LENGTH_BYTES + length + max((one.end for one in tensors.values()), default=0)
    if size != end:
        raise ConfigError(f"{path} has {size} bytes, but its header says {end}: {INCOMPLETE}")
    return {name: one.shape for name, one in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a header.

    Attributes:
        end: of its bytes, counted from the end of the header.
    """

    shape: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Entry:
        start, end = entry["data_offsets"]
        shape = tuple(int(side) for side in entry["shape"])
        if not 0 <= start <= end or min(shape, default=0) < 0:
            raise ValueError(f"{entry}")
        return cls(shape, end)


def folder_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every configuration and weight file, by path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _HASHED)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
