"""Many groups beside each other: each request is dealt to the group with the least work.

Work that a group's plan has given up does not count: a request that came would go before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ray_cluster.policies.sp_types import GroupView, Planner, RoundDecision
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.groups import GroupOutcome, GroupTask, SimulatedGroup


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What came of a fleet's requests.

    Attributes:
        num_requests: that ended, and of those
        num_on_time: by their deadlines.
        num_decisions: that all groups' planners took.
        num_events: of the simulation.
        on_time_by_class: requests on time, and
        requests_by_class: all of them, by class.
    """

    num_requests: int
    num_on_time: int
    num_decisions: int
    num_events: int
    on_time_by_class: dict[str, int]
    requests_by_class: dict[str, int]


def run_fleet(
    tasks: Sequence[GroupTask],
    planner: Planner,
    *,
    num_groups: int,
    num_gpus: int,
    switch_s: float,
) -> FleetRun:
    """Run requests through equal groups to their ends.

    Args:
        tasks: in the order of their arrivals.
        planner: of every group.
        num_groups: how many there are.
        num_gpus: of each.
        switch_s: seconds that a change of degree costs.
    """
    events = EventQueue()
    fleet = _Fleet(events, planner, num_groups=num_groups, num_gpus=num_gpus, switch_s=switch_s)
    for task in tasks:
        events.at(task.arrival_s, partial(fleet.deal, task))
    events.run()
    return FleetRun(
        sum(fleet.ended.values()),
        sum(fleet.on_time.values()),
        sum(group.num_decisions for group in fleet.groups),
        events.num_happened,
        fleet.on_time,
        fleet.ended,
    )


class _Fleet:
    """Groups, the GPU-seconds that each still has to do, and how its requests ended."""

    def __init__(
        self,
        events: EventQueue,
        planner: Planner,
        *,
        num_groups: int,
        num_gpus: int,
        switch_s: float,
    ) -> None:
        self.on_time: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self._planner = planner
        # GPU-seconds by request: of all that a group has, and of those its plan has given up
        self._works_s: list[dict[int, float]] = [{} for _ in range(num_groups)]
        self._lost_s: list[dict[int, float]] = [{} for _ in range(num_groups)]
        self._levels_s = [0.0] * num_groups
        self.groups = [
            SimulatedGroup(
                events,
                partial(self._plan, number),
                num_gpus=num_gpus,
                switch_s=switch_s,
                on_end=partial(self._end, number),
            )
            for number in range(num_groups)
        ]

    def deal(self, task: GroupTask) -> None:
        """Give a request to the group with the least work, the first of equals."""
        number = self._levels_s.index(min(self._levels_s))
        self._works_s[number][task.request_id] = _gpu_s(task)
        self.groups[number].add(task)

    def _plan(self, number: int, view: GroupView) -> RoundDecision:
        decision = self._planner(view)
        works_s = self._works_s[number]
        self._lost_s[number] = {one: works_s[one] for one in decision.sacrificed}
        self._weigh(number)
        return decision

    def _end(self, number: int, outcome: GroupOutcome) -> None:
        request_id, name = outcome.task.request_id, outcome.task.menu.slo_class
        del self._works_s[number][request_id]
        self._lost_s[number].pop(request_id, None)
        self._weigh(number)
        self.ended[name] = self.ended.get(name, 0) + 1
        self.on_time[name] = self.on_time.get(name, 0) + outcome.is_on_time

    def _weigh(self, number: int) -> None:
        """Count the work of a group that stands in the way of a new request."""
        self._levels_s[number] = math.fsum(self._works_s[number].values()) - math.fsum(
            self._lost_s[number].values()
        )


def _gpu_s(task: GroupTask) -> float:
    """GPU-seconds that a request takes at its cheapest."""
    return task.num_steps * task.menu.frontier[0][1]
