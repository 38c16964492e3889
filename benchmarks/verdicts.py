"""An aim beside what was measured, and whether its interval leaves a doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["yes", "no", "unsure"]


@dataclass(frozen=True, slots=True)
class Aim:
    """One aim beside what was measured.

    Attributes:
        interval: of 95 %.
        verdict: ``unsure`` when the interval lies on both sides of the aim.
    """

    name: str
    wanted: str
    measured: float
    unit: str
    interval: tuple[float, float]
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def at_least(name: str, least: float, measured: float, interval: Sequence[float], unit: str) -> Aim:
    """Return a figure that should not be below an aim."""
    low, high = interval
    verdict = _verdict(low >= least, high < least)
    return Aim(name, f"at least {least:g} {unit}", measured, unit, (low, high), verdict)


def at_most(name: str, most: float, measured: float, interval: Sequence[float], unit: str) -> Aim:
    """Return a figure that should not be above an aim."""
    low, high = interval
    verdict = _verdict(high <= most, low > most)
    return Aim(name, f"at most {most:g} {unit}", measured, unit, (low, high), verdict)


def may_be_at_least(
    name: str, aim: float, measured: float, interval: Sequence[float], unit: str
) -> Aim:
    """Return a figure whose interval should not lie below an aim."""
    low, high = interval
    wanted = f"{aim:g} {unit} or more in the interval"
    return Aim(name, wanted, measured, unit, (low, high), _verdict(high >= aim, high < aim))


def may_be_at_most(
    name: str, aim: float, measured: float, interval: Sequence[float], unit: str
) -> Aim:
    """Return a figure whose interval should not lie above an aim."""
    low, high = interval
    wanted = f"{aim:g} {unit} or less in the interval"
    return Aim(name, wanted, measured, unit, (low, high), _verdict(low <= aim, low > aim))


def aim_row(aim: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of a table for an aim's :meth:`Aim.as_dict`."""
    low, high = aim["interval"]
    return {
        "aim": aim["name"],
        "wanted": aim["wanted"],
        "measured": f"{aim['measured']:.2f} {aim['unit']}",
        "95 %": f"{low:.2f} to {high:.2f}",
        "met": aim["verdict"],
    }


def _verdict(is_met: bool, is_missed: bool) -> Verdict:
    return "yes" if is_met else "no" if is_missed else "unsure"
