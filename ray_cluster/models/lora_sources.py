"""Where files of LoRAs come from: checked against what is allowed, and copied within bounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.utils import get_protocol

from ray_cluster.errors import InvalidRequest, without_password
from ray_cluster.models.builtin import builtin_kinds, weights_folder

SUFFIX = ".safetensors"
_DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
_BUILTIN, _HUB = "builtin:", "hf:"
_PIECE_BYTES = 1 << 20
_NUM_NAMED = 5


def check_source(source: str, allowed: Sequence[str]) -> None:
    """Check that a source is one of those that are allowed, without asking it.

    Args:
        allowed: what it may begin with; see ``loras.sources`` of the configuration.

    Raises:
        InvalidRequest: it is not, or is none at all.
    """
    if source.startswith(_BUILTIN):
        is_allowed = _BUILTIN in allowed
    elif source.startswith(_HUB):
        is_allowed = any(_is_below(source, one) for one in allowed if one.startswith(_HUB))
    elif "://" in source:
        is_allowed = _is_plain_url(source) and any(
            _is_below(source, one) for one in allowed if "://" in one
        )
    else:
        is_allowed = any(_is_inside(Path(source), Path(one)) for one in _folders(allowed))
    if not is_allowed:
        raise InvalidRequest(
            f"The source {without_password(source)!r} is not allowed: it must begin with one of "
            f"{[without_password(one) for one in allowed]} (loras.sources of the configuration).",
            "source",
        )


def _folders(allowed: Sequence[str]) -> Iterator[str]:
    return (one for one in allowed if "://" not in one and not one.startswith((_BUILTIN, _HUB)))


def _is_below(source: str, start: str) -> bool:
    """Whether a URL or hub id begins with another one, segment by segment."""
    if start == _HUB:
        return True
    start = start.rstrip("/")
    return source == start or source.startswith(f"{start}/")


def _is_plain_url(source: str) -> bool:
    """Whether its path goes nowhere but down, and its host is all that is before it."""
    parts = urlsplit(source)
    segments = unquote(parts.path).replace("\\", "/").split("/")
    return ".." not in segments and "@" not in parts.netloc


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a path leads into a folder, links followed."""
    return path.is_absolute() and path.resolve().is_relative_to(root.resolve())


@contextmanager
def _opened(source: str, allowed: Sequence[str]) -> Iterator[IO[bytes]]:
    if source.startswith(_HUB):
        with _hub_file(source.removeprefix(_HUB)).open("rb") as file:
            yield file
    elif "://" in source and get_protocol(source) != "file":
        _check_suffix(urlsplit(source).path, source)
        with fsspec.open(source, "rb", block_size=_PIECE_BYTES) as file:
            yield file
    else:
        path = _local_file(source)
        if not source.startswith(_BUILTIN):
            # what it leads to may have changed since it was registered
            check_source(str(path), allowed)
        _check_suffix(path.name, source)
        with path.open("rb") as file:
            yield file


def _local_file(source: str) -> Path:
    path = Path(source)
    if source.startswith(_BUILTIN):
        name = source.removeprefix(_BUILTIN)
        known = [one for one, kind in builtin_kinds().items() if kind == "LoRA"]
        if name not in known:
            raise _wrong(source, f"built-in LoRAs are {', '.join(known)}")
        path = weights_folder() / name
    elif "://" in source:
        path = Path(urlsplit(source).path)
    if path.is_dir():
        path = path / _only([one.name for one in path.iterdir()], source)
    return path


def _check_suffix(name: str, source: str) -> None:
    if not name.lower().endswith(SUFFIX):
        raise _wrong(source, f"it is no file of {SUFFIX}: other formats can hold programs")


def _hub_file(name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    where = f"{owner}/{repository}"
    if not file:
        file = _only(HfApi().list_repo_files(where), f"{_HUB}{name}")
    _check_suffix(file, f"{_HUB}{name}")
    return Path(hf_hub_download(where, file))


def _only(names: Sequence[str], source: str) -> str:
    """Return the file among several that is the LoRA."""
    found = sorted(one for one in names if one.endswith(SUFFIX))
    if _DIFFUSERS_NAME in found:
        return _DIFFUSERS_NAME
    if len(found) != 1:
        raise _wrong(
            source, f"it has {len(found)} files of {SUFFIX}: {found[:_NUM_NAMED]}; name one of them"
        )
    return found[0]


def _wrong(source: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{without_password(source)}: {reason}", "source")


def fetch(source: str, allowed: Sequence[str], target: Path, *, max_bytes: int, sha256: str) -> str:
    """Copy a source to a file; return its SHA-256 in hexadecimal digits.

    Args:
        max_bytes: of a file; more are not even read.
        sha256: that it must have; empty for any.

    Raises:
        InvalidRequest: the source will never do.
        OSError: it does not answer, or has no such file at present.
    """
    check_source(source, allowed)
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with _opened(source, allowed) as file, target.open("wb") as copy:
            while piece := file.read(_PIECE_BYTES):
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise _wrong(source, f"the file is larger than the {max_bytes} bytes allowed")
                digest.update(piece)
                copy.write(piece)
    except (InvalidRequest, OSError):
        raise
    except Exception as error:
        # each protocol has errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from error
    found = digest.hexdigest()
    if sha256 and found != sha256:
        raise _wrong(source, f"its digest is {found}, and {sha256} was registered")
    return found
