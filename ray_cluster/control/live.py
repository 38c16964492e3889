"""A running cell behind the plan loop: its dispatcher shows and applies, its scaler starts
replicas.

Rounds run in a thread of their own: no plan, however long it takes, holds up an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ray_cluster.control.cell_fleet import Asked, CellFleet, CurvesOf, fleet_of, state_of
from ray_cluster.control.loop import LoopLimits
from ray_cluster.control.records import Glance
from ray_cluster.policies.planning.cell_planner import CellMemory, CellPlanner, cell_planner
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.plan import Plan, PlannedSettings, PoolPlan
from ray_cluster.protocol.controller import ControlCalls, Observation

T = TypeVar("T")


class Scaler(Protocol):
    """Who starts and stops replicas; every method may raise what a cluster may fail with."""

    def targets(self) -> Mapping[str, int]:
        """Return how many replicas are to be kept, by pool."""

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon."""

    def supply(self) -> Mapping[str, int]:
        """Return the hundredths of each device that there are."""


class LiveCluster:
    """The cluster of a plan loop; its methods are called in the loop's thread.

    Args:
        calls: the dispatcher's.
        loop: on which they run.
        curves_of: see :data:`ray_cluster.control.cell_fleet.CurvesOf`.
    """

    def __init__(
        self,
        calls: ControlCalls,
        loop: asyncio.AbstractEventLoop,
        scaler: Scaler,
        curves_of: CurvesOf,
    ) -> None:
        self._calls = calls
        self._loop = loop
        self._scaler = scaler
        self._curves_of = curves_of
        self._cursors: dict[str, int] = {}
        self._asked: dict[str, Asked] = {}
        self.glance: Glance | None = None

    def observe(self) -> ClusterState:
        """Return the state, with the confidences since the last call."""
        seen = self.ask(self._calls.observe(self._cursors))
        targets = self._scaler.targets()
        # what is not deployed cannot be scaled
        deployed = tuple(one for one in seen.pools if one.pool in targets)
        seen = replace(seen, pools=deployed)
        planned = fleet_of(seen, self._curves_of)
        for pool in planned.pools:
            self._asked.setdefault(pool, Asked(targets[pool]))
        state = state_of(
            seen,
            planned,
            supply=self._scaler.supply(),
            targets=targets,
            asked=self._asked,
            in_force=_in_force(seen, planned, targets),
        )
        # not before: what failed is seen again
        self._cursors = {one.name: one.num_scored for one in seen.cascades}
        self.glance = Glance(seen, planned, state)
        return state

    def scale(self, pool: str, num_replicas: int) -> None:
        self._scaler.scale(pool, num_replicas)
        assert self.glance is not None, "nothing was observed yet"
        if num_replicas != self._asked[pool].num_replicas:
            self._asked[pool] = Asked(num_replicas, self.glance.seen.now_s)

    def apply(self, settings: PlannedSettings) -> None:
        self.ask(self._calls.apply_plan(settings))

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what a call of the dispatcher returns."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def limits(self) -> LoopLimits:
        """Return what the settings allow the loop to do."""
        if self.glance is None:
            return LoopLimits(acts=False)
        given = self.glance.seen.limits
        return LoopLimits(
            acts=not (given.is_paused or given.dry_run),
            most_scales=given.max_actions_per_period,
            apply_timeout_s=given.apply_timeout_s,
        )


def _in_force(seen: Observation, planned: CellFleet, targets: Mapping[str, int]) -> Plan:
    """Return what is applied, of the pools that are planned."""
    plan = seen.plan or PlannedSettings(0, (), ())
    caps = dict(plan.max_batches)
    pools = tuple(PoolPlan(name, targets[name], caps.get(name, 0)) for name in planned.pools)
    # a later controller counts on from there: plans that only scale change no settings
    return Plan(pools, plan.cascades, max(plan.version, seen.last_version))


class LivePlanner:
    """Plans with the fleet of the latest observation.

    Args:
        glance: returns it.
    """

    def __init__(self, glance: Callable[[], Glance | None]) -> None:
        self._glance = glance

    def begin(self, state: ClusterState) -> CellMemory:
        return self._planner().begin(state)

    def plan(self, state: ClusterState, memory: CellMemory) -> tuple[Plan, CellMemory]:
        return self._planner().plan(state, memory)

    def _planner(self) -> CellPlanner:
        glance = self._glance()
        assert glance is not None, "nothing was observed yet"
        return cell_planner(
            glance.planned.fleet,
            glance.planned.helpers,
            dwell_s=glance.seen.limits.dwell_s,
            slo_s=glance.seen.default_slo_s,
        )
