"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        level: a ``problem`` keeps the configuration from running; a ``warning`` does not.
        advice: what to do about it; empty where there is nothing to do.
    """

    subject: str
    level: Level
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """All is well."""
    return Finding(subject, "ok", found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """It runs, with a drawback."""
    return Finding(subject, "warning", found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    """It cannot run."""
    return Finding(subject, "problem", found, advice)
