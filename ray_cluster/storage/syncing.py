"""Makes files and folders survive a power failure. Calls block: keep them off event loops."""

from __future__ import annotations

import errno
import os
from itertools import takewhile
from pathlib import Path

# what file systems say that cannot sync a folder, or need not
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})


def sync_file(path: str | Path) -> None:
    """Wait until a file's bytes are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folder(path: str | Path) -> None:
    """Wait until the names in a folder are on the disk, as far as its file system can tell."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(number)


def make_folder(path: str | Path) -> None:
    """Make a folder and those that lead to it; what is new survives a power failure."""
    folder = Path(path).absolute()
    new = list(takewhile(lambda one: not one.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for one in new:
        sync_folder(one.parent)
