"""Where files of LoRAs come from: checked against what is allowed, and copied within bounds."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import fsspec

from ray_cluster.errors import InvalidRequest, without_password
from ray_cluster.models.builtin import builtin_kinds, weights_folder
from ray_cluster.models.sources.addresses import PrivateHosts

if TYPE_CHECKING:
    from ray_cluster.models.sources.lora_hub import HubFile

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What PEFT saves: factors, and their alphas and ranks beside them."""

_DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
# as diffusers' scripts name the embeddings of new words that belong to a LoRA
_NEW_WORDS = re.compile(r"(?i).*_emb(?:eddings?)?\.safetensors")
_MAX_CONFIG_BYTES = 4 << 20
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
            is_below(source, one) for one in allowed if one.startswith(_HUB)
        )
    elif (path := _local_path(source)) is not None:
        is_allowed = _leads_inside(path, allowed)
    else:
        is_allowed = is_plain_url(source) and any(
            is_below(source, one) for one in allowed if "://" in one
        )
    if not is_allowed:
        raise _not_allowed(source, allowed)
    if source.startswith(("http://", "https://")):
        # of a link that only leads to a file, nobody here knows what it is
        _check_suffix(urlsplit(source).path, source)


def _not_allowed(source: str, allowed: Sequence[str]) -> InvalidRequest:
    said = f"The source {without_password(source)!r} is not allowed:"
    where = "(loras.sources of the configuration)"
    if any(source.startswith(f"{one.rstrip('/')}/") for one in allowed):
        return InvalidRequest(
            f"{said} it begins with what is, and leads out of it, by '..', by a link or by what an "
            f"address may not have {where}.",
            "source",
        )
    return InvalidRequest(
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


def is_below(source: str, start: str) -> bool:
    """Whether a URL or hub id begins with another one, segment by segment."""
    if start == _HUB:
        return True
    start = start.rstrip("/")
    return source == start or source.startswith(f"{start}/")


def is_plain_url(source: str) -> bool:
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


def _leads_inside(path: Path, allowed: Sequence[str]) -> bool:
    """Whether a path leads into one of the folders that are allowed."""
    roots = (_local_path(one) for one in allowed)
    return any(_is_inside(path, root) for root in roots if root is not None)


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a path leads into a folder, links followed."""
    try:
        return path.is_absolute() and path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        # links that lead in a circle, or what no path can contain
        return False


def _found_path(source: str) -> Path | None:
    """Return the file of this machine that a source means, or None if it is elsewhere."""
    path = _builtin_folder(source) if source.startswith(_BUILTIN) else _local_path(source)
    if path is None:
        return None
    if path.is_dir():
        path = path / only_file([one.name for one in path.iterdir()], source)
    _check_suffix(path.name, source)
    return path


def _real_path(path: Path, allowed: Sequence[str]) -> Path:
    """Return where a path leads, links followed; a hub's cache has names for its links alone."""
    found = path.resolve()
    if not _is_inside(found, weights_folder()) and not _leads_inside(found, allowed):
        # it leads elsewhere than when it was registered; where is not for callers
        raise _not_allowed(str(path), allowed)
    return found


def _builtin_folder(source: str) -> Path:
    name = source.removeprefix(_BUILTIN)
    known = [one for one, kind in builtin_kinds().items() if kind == "LoRA"]
    if name not in known:
        raise _wrong(source, f"built-in LoRAs are {', '.join(known)}")
    return weights_folder() / name


def _check_suffix(name: str, source: str) -> None:
    if not name.lower().endswith(SUFFIX):
        raise _wrong(source, f"it is no file of {SUFFIX}: other formats can hold programs")


def only_file(names: Sequence[str], source: str) -> str:
    """Return the file among several that is the LoRA."""
    # macOS writes a file of its own beside each, with these two characters before its name
    files = (one for one in names if not one.startswith("._"))
    found = sorted(one for one in files if one.lower().endswith(SUFFIX))
    if words := [one for one in found if _NEW_WORDS.fullmatch(one)]:
        raise _wrong(
            source,
            f"{words[0]} has embeddings of new words for prompts (pivotal tuning), which are not "
            "covered; name the file with the LoRA's layers to use it without these words",
        )
    for known in (_DIFFUSERS_NAME, PEFT_FILE):
        if known in found:
            return known
    if len(found) != 1:
        raise _wrong(
            source, f"it has {len(found)} files of {SUFFIX}: {found[:_NUM_NAMED]}; name one of them"
        )
    return found[0]


def _wrong(source: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{without_password(source)}: {reason}", "source")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a fetch may reach, and for how much.

    Attributes:
        max_bytes: of a file; more are not even read.
        private_hosts, min_bytes_per_s: ``private_hosts`` and ``min_fetch_bytes_per_s`` of
            ``loras`` in the configuration.
    """

    max_bytes: int
    private_hosts: tuple[str, ...] = ()
    min_bytes_per_s: int = 0


def fetch(
    source: str, allowed: Sequence[str], target: Path, bounds: Bounds, *, sha256: str = ""
) -> str:
    """Copy a source to a file; return its SHA-256 in hexadecimal digits.

    Args:
        sha256: that it must have; empty for any.

    Raises:
        InvalidRequest: the source will never do.
        OSError: it does not answer, or has no such file at present.
    """
    check_source(source, allowed)
    file = _file_of(source, allowed, bounds)
    digest, num_bytes = hashlib.sha256(), 0
    with target.open("wb") as copy:

        def write(piece: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(piece)
            if num_bytes > bounds.max_bytes:
                limit = f"the {bounds.max_bytes} bytes allowed"
                raise _wrong(source, f"the file is larger than {limit}")
            digest.update(piece)
            copy.write(piece)

        _read(file, allowed, bounds, write)
    found = digest.hexdigest()
    if sha256 and found != sha256:
        raise _wrong(source, f"its digest is {found}, and {sha256} was registered")
    if str(file).rpartition("/")[2] == PEFT_FILE:
        _fetch_config(file, allowed, bounds, config_beside(target))
    return found


def config_beside(file: Path) -> Path:
    """Return where PEFT's configuration of a file is: beside it, or beside the copy of it."""
    if file.name == PEFT_FILE:
        return file.with_name(PEFT_CONFIG)
    return file.with_suffix(f".{PEFT_CONFIG}")


def _fetch_config(file: str | Path, allowed: Sequence[str], bounds: Bounds, target: Path) -> None:
    """Copy PEFT's configuration, if there is one: a file may say all that matters itself."""
    content = bytearray()

    def write(piece: bytes) -> None:
        content.extend(piece)
        if len(content) > _MAX_CONFIG_BYTES:
            limit = f"more than {_MAX_CONFIG_BYTES} bytes"
            raise _wrong(str(file), f"{PEFT_CONFIG} beside it has {limit}")

    beside: str | Path
    if isinstance(file, Path):
        beside = file.with_name(PEFT_CONFIG)
        if not beside.is_file():
            return
    else:
        beside = file.removesuffix(PEFT_FILE) + PEFT_CONFIG
    try:
        _read(beside, allowed, bounds, write)
    except (InvalidRequest, OSError) as error:
        # hosts say of what they have not that it is forbidden, or nothing
        logger.info("%s is not read: %s", without_password(beside), error)
        return
    target.write_bytes(content)


def _file_of(source: str, allowed: Sequence[str], bounds: Bounds) -> str | Path:
    """Return the one file that a source means: a path, or an address without folders."""
    if (path := _found_path(source)) is not None:
        _real_path(path, allowed)
        return path
    if source.startswith(_HUB):
        hub = _hub(source, allowed, bounds)
        if not hub.path:
            source = f"{source.rstrip('/')}/{only_file(hub.list_files(), source)}"
    else:
        _check_suffix(urlsplit(source).path, source)
    return source


def _hub(source: str, allowed: Sequence[str], bounds: Bounds) -> HubFile:
    from ray_cluster.models.sources.lora_hub import HubFile

    return HubFile(source, allowed, bounds.private_hosts, bounds.min_bytes_per_s)


def _read(
    source: str | Path, allowed: Sequence[str], bounds: Bounds, write: Callable[[bytes], None]
) -> None:
    if isinstance(source, Path):
        with _real_path(source, allowed).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                write(piece)
    elif source.startswith(_HUB):
        hub = _hub(source, allowed, bounds)
        hub.download(hub.path, write)
    elif source.startswith(("http://", "https://")):
        _read_web(source, allowed, bounds, write)
    else:
        for piece in _other_pieces(source):
            write(piece)


def _read_web(
    source: str, allowed: Sequence[str], bounds: Bounds, write: Callable[[bytes], None]
) -> None:
    # not above: whoever only checks sources needs none of it
    from yarl import URL

    from ray_cluster.models.sources.lora_http import Web, download

    starts = [URL(one) for one in allowed if one.startswith(("http://", "https://"))]

    def may_ask(url: URL) -> bool:
        return is_plain_url(str(url)) and any(is_below(str(url), str(one)) for one in starts)

    web = Web(
        may_ask,
        PrivateHosts(bounds.private_hosts),
        addresses=[one.host or "" for one in starts],
        min_bytes_per_s=bounds.min_bytes_per_s,
    )
    download(URL(source), web, write)


def _other_pieces(source: str) -> Iterator[bytes]:
    """Yield the content of a URL of fsspec."""
    try:
        with fsspec.open(source, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except Exception as error:
        # each protocol has errors of its own, which tell callers of the network here
        shown = without_password(source)
        logger.warning("%s cannot be read: %s", shown, error)
        raise OSError(f"{shown} does not give the file ({type(error).__name__})") from error
