"""Many groups beside each other: each request is dealt to the group with the least work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ray_cluster.policies.sp_types import Planner
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.groups import GroupTask, Outcome, SimulatedGroup


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
        self._works_s = [0.0] * num_groups
        self.groups = [
            SimulatedGroup(
                events,
                planner,
                num_gpus=num_gpus,
                switch_s=switch_s,
                on_end=partial(self._end, number),
            )
            for number in range(num_groups)
        ]

    def deal(self, task: GroupTask) -> None:
        """Give a request to the group with the least work, the first of equals."""
        number = self._works_s.index(min(self._works_s))
        self._works_s[number] += _gpu_s(task)
        self.groups[number].add(task)

    def _end(self, number: int, outcome: Outcome) -> None:
        self._works_s[number] -= _gpu_s(outcome.task)
        name = outcome.task.menu.slo_class
        self.ended[name] = self.ended.get(name, 0) + 1
        self.on_time[name] = self.on_time.get(name, 0) + outcome.is_on_time


def _gpu_s(task: GroupTask) -> float:
    """GPU-seconds that a request takes at its cheapest."""
    return task.num_steps * task.menu.frontier[0][1]
