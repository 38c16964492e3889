"""What ``doctor`` checks, and what one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        level: a ``problem`` keeps the configuration from running; a ``warning`` does not.
        advice: what to do about it; may be empty.
    """

    subject: str
    level: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """Return a finding where all is well."""
    return Finding(subject, "ok", found)


def warning(subject: str, found: str, advice: str = "") -> Finding:
    """Return a finding with which the service runs, with a drawback."""
    return Finding(subject, "warning", found, advice)


def problem(subject: str, found: str, advice: str = "") -> Finding:
    """Return a finding with which it cannot run."""
    return Finding(subject, "problem", found, advice)
