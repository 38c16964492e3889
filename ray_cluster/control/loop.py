"""The plan loop: observe, plan, compare with what is applied, and apply the difference.

Live and simulated clusters run this code behind the protocols below; a planner decides. The loop
owns what lives between rounds: the last state, the planner's memory and the plan as far as it was
applied. What could not be applied is tried again in the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from ray_cluster.errors import RayClusterError
from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.policies.plan import Plan, PlanDiff, PlannedSettings, PoolPlan, diff
from ray_cluster.policies.planner import Planner

M = TypeVar("M")

# what a cluster may fail with; anything else is a bug and ends the loop
FAILURES = (RayClusterError, OSError)

_log = logging.getLogger(__name__)


class Timer(Protocol):
    """Something that will happen once, unless it is called off."""

    def call_off(self) -> None:
        """Cancel it."""


class Clock(Protocol):
    """Time, and a way to be called later."""

    def __call__(self) -> float:
        """Return the present instant in seconds; it never goes back."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Timer:
        """Call something once after a while."""


class Cluster(Protocol):
    """What is planned. Every method may raise `FAILURES`, and may have acted all the same."""

    def observe(self) -> ClusterState:
        """Return the state, with the confidences since the last call."""

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon; idempotent."""

    def apply(self, settings: PlannedSettings) -> None:
        """Apply batch caps and thresholds at once; ignored if a later version was applied."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did.

    Attributes:
        actions: that were asked for; None without a state to plan for.
        failures: of actions, in words.
    """

    at_s: float
    plan: Plan
    actions: PlanDiff | None
    failures: tuple[str, ...] = ()


class ControlLoop(Generic[M]):
    """Rounds of planning for one cluster.

    Args:
        period_s: from round to round.
        on_round: called with every round's report.
        applied: the plan that the cluster has already, if any.
    """

    def __init__(
        self,
        planner: Planner[M],
        cluster: Cluster,
        clock: Clock,
        *,
        period_s: float,
        on_round: Callable[[RoundReport], None] = lambda _: None,
        applied: Plan | None = None,
    ) -> None:
        self._planner = planner
        self._cluster = cluster
        self._clock = clock
        self._period_s = period_s
        self._on_round = on_round
        self._applied = applied or Plan()
        self._wanted = self._applied
        self._state: ClusterState | None = None
        self._memory: M | None = None
        self._timer: Timer | None = None

    @property
    def applied(self) -> Plan:
        """The plan as far as it was applied."""
        return self._applied

    @property
    def state(self) -> ClusterState | None:
        return self._state

    def start(self) -> None:
        """Run a round now, and one every period."""
        self._run_and_go_on()

    def stop(self) -> None:
        """Run no more rounds; the cluster stays as it is."""
        if self._timer is not None:
            self._timer.call_off()

    def _run_and_go_on(self) -> None:
        # first the next one: whatever this round does, the loop goes on
        self._timer = self._clock.after(self._period_s, self._run_and_go_on)
        self.run_round()

    def run_round(self) -> RoundReport:
        report = self._round()
        for failure in report.failures:
            _log.warning("round at %.1f s: %s; it is tried again", report.at_s, failure)
        self._on_round(report)
        return report

    def _round(self) -> RoundReport:
        try:
            state = self._cluster.observe()
        except FAILURES as error:
            return RoundReport(self._clock(), self._wanted, None, (f"cannot observe: {error}",))
        self._state = state
        memory = self._planner.begin(state) if self._memory is None else self._memory
        plan, self._memory = self._planner.plan(state, memory)
        self._wanted = self._versioned(plan)
        actions = diff(self._applied, self._wanted)
        return RoundReport(self._clock(), self._wanted, actions, tuple(self._apply(actions)))

    def _versioned(self, plan: Plan) -> Plan:
        """The plan with the version of the last one, or the next if anything is different."""
        same = replace(plan, version=self._wanted.version)
        return same if same == self._wanted else replace(same, version=same.version + 1)

    def _apply(self, actions: PlanDiff) -> list[str]:
        """Do the actions, note those that worked, and return what went wrong."""
        failures = []
        if actions.settings is not None:
            try:
                self._cluster.apply(actions.settings)
                self._note_settings(actions.settings)
            except FAILURES as error:
                failures.append(f"cannot apply settings: {error}")
        for scale in actions.scales:
            try:
                self._cluster.scale(scale.pool, scale.num_after)
                self._note_count(scale.pool, scale.num_after)
            except FAILURES as error:
                failures.append(f"cannot scale {scale.pool} to {scale.num_after}: {error}")
        return failures

    def _note_settings(self, settings: PlannedSettings) -> None:
        counts = {one.pool: one.num_replicas for one in self._applied.pools}
        pools = tuple(
            PoolPlan(pool, counts.get(pool, 0), batch) for pool, batch in settings.max_batches
        )
        self._applied = Plan(pools, settings.cascades, settings.version)

    def _note_count(self, pool: str, num_replicas: int) -> None:
        known = {one.pool: one for one in self._applied.pools}
        # caps that could not be turned stay unknown, and are asked for again
        before = known.get(pool, PoolPlan(pool, 0, 0))
        known[pool] = replace(before, num_replicas=num_replicas)
        self._applied = replace(self._applied, pools=tuple(known.values()))
