"""What the ranks of a group have done so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Written by the step thread; any thread may read.

    Attributes:
        steps: of images, by degree.
        step_s: seconds of these, by degree.
        num_switches: steps that began on other ranks than the image's last.
        num_lost: steps that were lost with their ranks.
        busy_s: rank-seconds in steps.
        idle_s: rank-seconds without one.
    """

    steps: Counter[int] = field(default_factory=Counter)
    step_s: Counter[int] = field(default_factory=Counter)
    num_switches: int = 0
    num_lost: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    _seen_s: float | None = None

    def pass_time(self, now_s: float, num_busy: int, num_ranks: int) -> None:
        """Count the time since the last call, in which so many ranks were at a step."""
        if self._seen_s is not None:
            passed_s = now_s - self._seen_s
            self.busy_s += passed_s * num_busy
            self.idle_s += passed_s * (num_ranks - num_busy)
        self._seen_s = now_s

    def stepped(self, degree: int, seconds: float) -> None:
        """Count a step."""
        self.steps[degree] += 1
        self.step_s[degree] += seconds  # type: ignore[assignment]
