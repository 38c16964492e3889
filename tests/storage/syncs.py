"""What a test sees of ``fsync``: what was made durable, and in which order."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Syncs:
    """Stands in for :func:`os.fsync` and notes what is synced.

    Attributes:
        seen: of each call the path and what was in the watched folder just then.
        threads: that called.
    """

    watched: Path
    seen: list[tuple[Path, set[str]]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in until the test ends."""
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, number: int) -> None:
        self.threads.add(threading.get_ident())
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        self.seen.append((path, {one.name for one in self.watched.iterdir()}))

    def end_with(self, name: str) -> bool:
        """Whether a file was synced under another name, then the folder with its name."""
        (file, before), (folder, after) = self.seen[-2:]
        is_hidden = file.parent == self.watched and file.name in before and file.name != name
        return is_hidden and folder == self.watched and name in after and file.name not in after
