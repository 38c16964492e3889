"""How much the benchmark of the controller measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.settings import Settings, quick_settings


@dataclass(frozen=True, slots=True)
class Amounts:
    """Numbers and seconds of each part.

    Attributes:
        reshapes: changes of a pool's replicas that are forced.
        dwell_s: of the plan while demand oscillates.
        dwells: dwell times for which it does.
        prompts: of the trace, each also made by both models beforehand.
        capacity_s: seconds in which the heavy model's capacity is measured.
        trace_s: length of the day of calls.
    """

    reshapes: int = 50
    dwell_s: float = 15.0
    dwells: int = 8
    prompts: int = 150
    capacity_s: float = 15.0
    trace_s: float = 180.0


_QUICK = Amounts(reshapes=5, dwell_s=10.0, dwells=2, prompts=10, capacity_s=2.0, trace_s=25.0)


def amounts_of(settings: Settings) -> Amounts:
    """Return the amounts of a whole run, or of a quick one."""
    return _QUICK if settings == quick_settings() else Amounts()
