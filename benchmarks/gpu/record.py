"""What a part of the suite found, and how much time it has; a failure costs one section."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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

    def leave_out(self, what: str, why: str) -> None:
        """Say in the results what is not in them."""
        self.found.setdefault("left_out", []).append({"what": what, "why": why})

    def fail(self, what: str) -> None:
        """Say in the results that something is wrong; the section goes on."""
        self.found.setdefault("problems", []).append(what)

    def fail_with_trace(self, what: str) -> None:
        """Likewise, with the traceback of the exception that is being handled."""
        self.fail(f"{what}\n{traceback.format_exc()}")


class Record:
    """The sections of one part, in a file after each of them.

    Args:
        path: of the file; None for none.
        budget_s: seconds from now for the whole part.
    """

    def __init__(self, path: Path | None, budget_s: float) -> None:
        self.sections: dict[str, dict[str, Any]] = {}
        self._path = path
        self._ends_s = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds that the part should still take at most."""
        return self._ends_s - time.monotonic()

    @contextmanager
    def section(self, name: str, share: float = 1.0) -> Iterator[Section]:
        """Run a section that may fail.

        Args:
            share: of the part's time that is left.
        """
        started_s = time.monotonic()
        section = Section(started_s + share * max(0.0, self.left_s))
        self.sections[name] = section.found
        self.save()
        try:
            yield section
        # whatever it is, the other sections are to be measured
        except Exception as error:  # noqa: BLE001
            section.fail_with_trace(f"ended by {type(error).__name__}")
        section.found["status"] = _status(section.found)
        section.found["seconds"] = round(time.monotonic() - started_s, 2)
        self.save()

    def save(self) -> None:
        """Write what there is, at once or not at all."""
        if self._path is not None:
            draft = self._path.with_suffix(".tmp")
            draft.write_text(as_json(self.sections), encoding="utf-8")
            draft.replace(self._path)


def as_json(found: Any) -> str:
    """Return results as JSON; figures that are not finite, which it does not know, as words."""
    return json.dumps(_finite(found), allow_nan=False)


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _finite(one) for name, one in found.items()}
    if isinstance(found, (list, tuple)):
        return [_finite(one) for one in found]
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def _status(found: dict[str, Any]) -> str:
    if found.get("problems"):
        return "failed"
    return "partial" if found.get("left_out") else "ok"
