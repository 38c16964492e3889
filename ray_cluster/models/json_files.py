"""Reading the small files of a model's folder; what is none of its files is named as what it is."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ray_cluster.errors import ConfigError

INCOMPLETE = "the model is incomplete; download it again"
# as safetensors has it for headers
MAX_HEADER_BYTES = 100_000_000
# enough for the start of a Git LFS pointer, or of a page
HEAD_BYTES = 512
_LFS_POINTER = b"version https://git-lfs.github.com/"
_PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<head")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: it cannot be read, or is something else; names the file and what to do.
    """
    try:
        with opened(path) as file:
            data = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    check_head(path, data[:HEAD_BYTES])
    if len(data) > MAX_HEADER_BYTES:
        raise ConfigError(f"{path} has more than {MAX_HEADER_BYTES} bytes; download it again")
    try:
        # not by its first bytes, as json would: the libraries take UTF-8 alone
        content = json.loads(data.decode("utf-8"))
    # deep nesting is no ValueError
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a JSON {type(content).__name__}, not an object; download it again"
        )
    return content


def opened(path: Path) -> BinaryIO:
    """Open a file; OSError where it is none: a pipe would wait for its other end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.open("rb")


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that is not there, or may not be read."""
    return ConfigError(f"{path} cannot be read ({error.strerror}): {INCOMPLETE}")


def check_head(path: Path, head: bytes) -> None:
    """Refuse what stands in the place of a file that was not downloaded.

    Args:
        head: the file's first bytes.

    Raises:
        ConfigError: it is empty, a Git LFS pointer or a web page.
    """
    start = head.lstrip().lower()
    if not start:
        raise ConfigError(f"{path} is empty: {INCOMPLETE}")
    if start.startswith(_LFS_POINTER):
        raise ConfigError(
            f"{path} is a Git LFS pointer, not the file itself; run 'git lfs pull' in the folder"
        )
    if start.startswith(_PAGES):
        raise ConfigError(
            f"{path} is a web page, not the file itself; download it again (the site may want a "
            "login, or a token)"
        )


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file, checked as of :func:`check_head`."""
    try:
        with opened(path) as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    check_head(path, head)
    return head
