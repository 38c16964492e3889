"""Where files of LoRAs come from: checked against what is allowed, and copied within bounds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import fsspec

from ray_cluster.errors import InvalidRequest, without_password
from ray_cluster.models.builtin import builtin_kinds, weights_folder

SUFFIX = ".safetensors"
_DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
_BUILTIN, _HUB = "builtin:", "hf:"
_LOCAL_URLS = ("file://", "local://")
_PIECE_BYTES = 1 << 20
_NUM_NAMED = 5


def check_source(source: str, allowed: Sequence[str]) -> None:
    """Check that a source is one of those that are allowed, without asking it.

    Args:
        allowed: what it may begin with; see ``loras.sources`` of the configuration.

    Raises:
        InvalidRequest: it is not, or is none at all, or there is no such built-in LoRA.
    """
    if source.startswith(_BUILTIN):
        is_allowed = _BUILTIN in allowed
        if is_allowed:
            _builtin_folder(source)
    elif source.startswith(_HUB):
        is_allowed = _is_hub_file(source) and any(
            _is_below(source, one) for one in allowed if one.startswith(_HUB)
        )
    elif (path := _local_path(source)) is not None:
        roots = (_local_path(one) for one in allowed)
        is_allowed = any(_is_inside(path, root) for root in roots if root is not None)
    else:
        is_allowed = _is_plain_url(source) and any(
            _is_below(source, one) for one in allowed if "://" in one
        )
    if is_allowed:
        return
    said = f"The source {without_password(source)!r} is not allowed:"
    where = "(loras.sources of the configuration)"
    if any(source.startswith(f"{one.rstrip('/')}/") for one in allowed):
        raise InvalidRequest(
            f"{said} it begins with what is, and leads out of it, by '..', by a link or by what an "
            f"address may not have {where}.",
            "source",
        )
    raise InvalidRequest(
        f"{said} it must begin with one of {[without_password(one) for one in allowed]} {where}.",
        "source",
    )


def origin_of(source: str) -> str:
    """Return what has to answer for a source: others do not hang because this one does."""
    if source.startswith((_BUILTIN, _HUB)):
        return source.partition(":")[0]
    return "" if _local_path(source) is not None else "://".join(urlsplit(source)[:2])


def _local_path(source: str) -> Path | None:
    """Return the path that a source is, or None if it is none."""
    if source.startswith(_LOCAL_URLS):
        return Path(unquote(urlsplit(source).path))
    is_path = "://" not in source and not source.startswith((_BUILTIN, _HUB))
    return Path(source) if is_path else None


def _is_hub_file(source: str) -> bool:
    """Whether it is ``hf:OWNER/NAME`` or a file of that."""
    segments = source.removeprefix(_HUB).split("/")
    return len(segments) > 1 and not {"", ".", ".."} & set(segments)


def _is_below(source: str, start: str) -> bool:
    """Whether a URL or hub id begins with another one, segment by segment."""
    if start == _HUB:
        return True
    start = start.rstrip("/")
    return source == start or source.startswith(f"{start}/")


def _is_plain_url(source: str) -> bool:
    """Whether its path goes nowhere but down, its host is all that is before it, and it is one URL.

    fsspec takes what ``::`` joins for several URLs, and for most protocols ``?`` and ``#`` for
    parts of the path.
    """
    try:
        parts = urlsplit(source)
    except ValueError:
        return False
    segments = re.split(r"[/\\?#]", unquote("/".join(parts[2:])))
    return ".." not in segments and "@" not in parts.netloc and "::" not in source


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a path leads into a folder, links followed."""
    try:
        return path.is_absolute() and path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        # links that lead in a circle, or what no path can contain
        return False


@contextmanager
def _opened(source: str, allowed: Sequence[str]) -> Iterator[IO[bytes]]:
    if (path := _found_path(source)) is not None:
        _check_suffix(path.name, source)
        if not source.startswith(_BUILTIN):
            # what it leads to may have changed since it was registered; a hub's cache names only
            # its links
            path = path.resolve()
            check_source(str(path), allowed)
        with path.open("rb") as file:
            yield file
        return
    options: dict[str, Any] = {}
    if source.startswith(_HUB):
        url = _hub_url(source)
    else:
        url, options = source, _options(source)
        _check_suffix(urlsplit(source).path, source)
    with fsspec.open(url, "rb", **options) as file:
        yield file


def _options(url: str) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        return {}
    import aiohttp

    # one answer, read to its end: many servers send no parts; the caller has a timeout of its own
    return {"block_size": 0, "client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None)}}


def _found_path(source: str) -> Path | None:
    """Return the file of this machine that a source means, or None if it is elsewhere."""
    path = _builtin_folder(source) if source.startswith(_BUILTIN) else _local_path(source)
    if path is not None and path.is_dir():
        return path / _only([one.name for one in path.iterdir()], source)
    return path


def _builtin_folder(source: str) -> Path:
    name = source.removeprefix(_BUILTIN)
    known = [one for one, kind in builtin_kinds().items() if kind == "LoRA"]
    if name not in known:
        raise _wrong(source, f"built-in LoRAs are {', '.join(known)}")
    return weights_folder() / name


def _check_suffix(name: str, source: str) -> None:
    if not name.lower().endswith(SUFFIX):
        raise _wrong(source, f"it is no file of {SUFFIX}: other formats can hold programs")


def _hub_url(source: str) -> str:
    """Return the URL of a hub's file as fsspec reads it, piece by piece: nothing is cached."""
    from huggingface_hub import HfApi

    owner, repository, *rest = source.removeprefix(_HUB).split("/")
    where = f"{owner}/{repository}"
    file = "/".join(rest) or _only(HfApi().list_repo_files(where), source)
    _check_suffix(file, source)
    return f"hf://{where}/{file}"


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
    except InvalidRequest:
        raise
    except Exception as error:
        # each protocol has errors of its own; fsspec says "not found" whatever the cause is
        cause = error.__cause__
        if isinstance(error, OSError) and cause is None:
            raise
        text = str(cause or "") or f"{type(error).__name__}: {error}"
        raise OSError(text) from error
    found = digest.hexdigest()
    if sha256 and found != sha256:
        raise _wrong(source, f"its digest is {found}, and {sha256} was registered")
    return found
