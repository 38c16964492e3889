"""What a sequence-parallel scheduler sees of a group of GPUs, and what it answers.

A group runs denoising steps of several requests beside each other, each on a number of GPUs of its
own (its degree). A step in flight is never interrupted: a new degree counts from the request's next
step boundary on, and GPUs that it gives up stay idle till then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

# sums of step times in another order differ by less than this many seconds
ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class DegreeMenu:
    """Seconds of one denoising step by sequence-parallel degree, for one kind of request.

    Attributes:
        slo_class: that requests of this kind are counted under.
        degrees: numbers of GPUs, rising.
        step_s: seconds per step at each of them, falling (see :func:`menu_of`).
        tail_s: seconds of a request beside its steps (encoding, decoding), on other GPUs.
        work: of a whole request, in any unit that all menus share.
    """

    slo_class: str
    degrees: tuple[int, ...]
    step_s: tuple[float, ...]
    tail_s: float = 0.0
    work: float = 1.0
    # by number of free GPUs, up to the largest degree: the level (place in the menu) of the
    # largest degree that fits; -1 where none does
    top_by_free: tuple[int, ...] = field(init=False, repr=False, compare=False)
    # (seconds, GPU-seconds) per step of what is worth mixing: from the cheapest to the fastest,
    # convex, so that a mix of neighbours is the cheapest way to a mean of seconds between them
    frontier: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.degrees))
        falling = all(a > b for a, b in pairwise(self.step_s))
        sized = 0 < len(self.degrees) == len(self.step_s) and self.degrees[0] > 0
        if not (sized and rising and falling and self.step_s[-1] > 0 <= self.tail_s):
            raise ValueError(
                "a menu needs rising degrees, as many falling step times above 0, and a tail of 0 "
                f"or more; given {self.degrees}, {self.step_s} and {self.tail_s}"
            )
        tops = [
            sum(degree <= free for degree in self.degrees) - 1
            for free in range(self.degrees[-1] + 1)
        ]
        object.__setattr__(self, "top_by_free", tuple(tops))
        object.__setattr__(self, "frontier", _frontier(self.degrees, self.step_s))

    @property
    def fastest_s(self) -> float:
        return self.step_s[-1]

    def top(self, num_free: int) -> int:
        """Return the level of the largest degree that fits into so many GPUs; -1 if none does."""
        return self.top_by_free[min(num_free, self.degrees[-1])]

    def level_of(self, degree: int) -> int:
        return self.degrees.index(degree) if degree in self.degrees else -1


def _frontier(
    degrees: tuple[int, ...], step_s: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    hull: list[tuple[float, float]] = []
    points = [(seconds, seconds * degree) for degree, seconds in zip(degrees, step_s, strict=True)]
    for point in reversed(points):
        # from the fastest on, slower ones; a point above the line of its neighbours is no use
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    cheapest = min(range(len(hull)), key=lambda number: (hull[number][1], hull[number][0]))
    return tuple(reversed(hull[: cheapest + 1]))


def _is_above(
    middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]
) -> bool:
    """Whether a point lies on or above the line between two others."""
    rise = (middle[1] - left[1]) * (right[0] - left[0])
    return rise >= (right[1] - left[1]) * (middle[0] - left[0])


def menu_of(
    slo_class: str,
    seconds_by_degree: dict[int, float],
    *,
    num_gpus: int,
    tail_s: float = 0.0,
    work: float = 1.0,
) -> DegreeMenu:
    """Return the menu of the degrees that a group of so many GPUs can use and that pay."""
    degrees: list[int] = []
    times_s: list[float] = []
    for degree, seconds in sorted(seconds_by_degree.items()):
        if degree <= num_gpus and (not times_s or seconds < times_s[-1]):
            degrees.append(degree)
            times_s.append(seconds)
    return DegreeMenu(slo_class, tuple(degrees), tuple(times_s), tail_s, work)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What a scheduler may know of one request in a group.

    Attributes:
        steps_left: denoising steps that have not begun, without the one in flight; in a forecast,
            with a part of one.
        has_begun: whether it ever took a step: to resume it costs a switch.
        degree: GPUs that it holds; 0 while it waits.
        target: GPUs of the last decision, from its next boundary on.
        ready_s: instant at which its step in flight is expected to end.
    """

    request_id: int
    menu: DegreeMenu
    steps_left: float
    arrival_s: float
    deadline_s: float
    has_begun: bool = False
    degree: int = 0
    target: int = 0
    ready_s: float = 0.0

    @property
    def due_s(self) -> float:
        """Instant by which its last step must have ended."""
        return self.deadline_s - self.menu.tail_s

    def in_flight_s(self, now_s: float) -> float:
        return max(0.0, self.ready_s - now_s) if self.degree else 0.0

    def finish_s(self, level: int, now_s: float) -> float:
        """Return the instant at which its last step ends at a level of its menu from now on."""
        return now_s + self.in_flight_s(now_s) + self.steps_left * self.menu.step_s[level]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group of GPUs and all of its requests that have not ended.

    Attributes:
        switch_s: seconds that a change of degree, or resuming a paused request, costs it.
        look_again_s: of the decision before this one; 0 at first.
    """

    num_gpus: int
    now_s: float
    requests: tuple[GroupRequest, ...]
    switch_s: float = 0.0
    look_again_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundDecision:
    """What a group does from each request's next step boundary on.

    Attributes:
        degrees: GPUs by request, in the view's order; 0 for none.
        dropped: requests that are given up for good.
        sacrificed: requests expected to miss their deadlines; they get what is left.
        look_again_s: instant of the next decision if nothing happens before.
    """

    degrees: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    sacrificed: tuple[int, ...] = ()
    look_again_s: float = math.inf


Planner = Callable[[GroupView], RoundDecision]


def is_hopeless(request: GroupRequest, now_s: float, *, doubt: float = 0.0) -> bool:
    """Whether a request misses its deadline even with all the GPUs it can use at once.

    Args:
        doubt: share by which steps may be faster than expected.
    """
    finish_s = request.finish_s(-1, now_s)
    return finish_s - doubt * (finish_s - now_s) > request.due_s + ROUNDING_S
