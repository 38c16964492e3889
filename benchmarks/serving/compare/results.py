"""Finished runs on disk: a line for each run of a contender on a trace at a load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving.compare.settings import Settings

Figures = dict[str, Any]


class ComparedCell(NamedTuple):
    """One run."""

    contender: str
    load: float
    trace: str


class SettingsDiffer(RuntimeError):
    """The folder has results of a comparison with other settings."""


class ResultStore:
    """The finished runs of a folder; a comparison that was stopped goes on with the others.

    Raises:
        SettingsDiffer: the folder was begun with other settings.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "cells.jsonl"
        _check(folder / "settings.json", settings)
        content = self._path.read_bytes() if self._path.exists() else b""
        # a line that was cut off is a run that did not end
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        rows: list[Figures] = [json.loads(line) for line in whole.splitlines()]
        self._rows = {
            ComparedCell(row["contender"], row["load"], row["trace"]): row for row in rows
        }

    def __contains__(self, cell: object) -> bool:
        return cell in self._rows

    def __getitem__(self, cell: ComparedCell) -> Figures:
        return self._rows[cell]

    def add(self, cell: ComparedCell, figures: Figures) -> None:
        """Store a finished run; it is on disk when this returns."""
        row = {**cell._asdict(), **figures}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows[cell] = row


def _check(path: Path, settings: Settings) -> None:
    wanted = json.loads(json.dumps(settings.identity()))
    if not path.exists():
        path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise SettingsDiffer(
                f"{path.parent} was begun with {name} {found.get(name)!r}, now "
                f"{wanted.get(name)!r}: take another folder, or the same settings"
            )
