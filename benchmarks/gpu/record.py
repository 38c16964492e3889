"""The results of one part of the suite, and its time; a failure costs one section."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import as_json


class Section:
    """One section in the making.

    Attributes:
        found: for the file of results; filled as figures come, so that none is lost.
    """

    def __init__(self, ends_s: float) -> None:
        self.found: dict[str, Any] = {"status": "running"}
        self._ends_s = ends_s

    @property
    def left_s(self) -> float:
        """Seconds that it should still take at most."""
        return self._ends_s - time.monotonic()

    def table(self, title: str) -> list[dict[str, Any]]:
        """Return the rows of a table, to be filled."""
        rows: list[dict[str, Any]] = self.found.setdefault("tables", {}).setdefault(title, [])
        return rows

    def leave_out(self, what: str, why: str) -> None:
        """Note in the results what is not in them."""
        self.found.setdefault("notes", []).append(f"left out: {what} ({why})")

    def fail(self, what: str) -> None:
        """Note in the results that something is wrong; the section goes on."""
        self.found.setdefault("problems", []).append(what)

    def fail_with_trace(self, what: str) -> None:
        """Likewise, with the traceback of the exception that is being handled."""
        self.fail(f"{what}\n{traceback.format_exc()}")


class Record:
    """The sections of one part, in a file that is written after each of them.

    Args:
        budget_s: seconds from now for the whole part.

    Attributes:
        folder: of the file; what lies there goes with it, also if the part is killed.
    """

    def __init__(self, path: Path, budget_s: float) -> None:
        self.sections: dict[str, dict[str, Any]] = {}
        self._path, self.folder = path, path.parent
        self._ends_s = time.monotonic() + budget_s

    @contextmanager
    def section(self, name: str, share: float = 1.0) -> Iterator[Section]:
        """Run a section that may fail.

        Args:
            share: of the part's time that is left.
        """
        started_s = time.monotonic()
        section = Section(started_s + share * max(0.0, self._ends_s - started_s))
        self.sections[name] = section.found
        self._save()
        try:
            yield section
        # whatever it is, the other sections are to be measured
        except Exception as error:  # noqa: BLE001
            section.fail_with_trace(f"ended by {type(error).__name__}")
        found = section.found
        found["status"] = (
            "failed" if "problems" in found else "partial" if "notes" in found else "ok"
        )
        found["seconds"] = round(time.monotonic() - started_s, 2)
        self._save()

    def _save(self) -> None:
        """Write the sections, wholly or not at all."""
        draft = self._path.with_suffix(".tmp")
        draft.write_text(as_json(self.sections), encoding="utf-8")
        draft.replace(self._path)
