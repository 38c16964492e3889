"""The plan loop: observe, plan, compare with what is applied, and apply the difference.

Live and simulated clusters run this code behind the protocols below; a planner decides. The loop
owns what lives between rounds: the last state, the planner's memory, the plan as far as it was
applied, and the replicas that are awaited. What could not be applied is tried again in the next
round; so is what somebody else has changed, where the cluster says what is in force. Replicas that
are not ready in time are given up for a while.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from ray_cluster.errors import RayClusterError
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.plan import (
    Plan,
    PlanDiff,
    PlannedSettings,
    PoolPlan,
    bounded,
    diff,
    settled,
)
from ray_cluster.policies.planning.planner import Planner
from ray_cluster.policies.planning.rollback import (
    Growths,
    Hold,
    Overdue,
    Patience,
    Targets,
    held_back,
    holds_of,
    judge,
    noted,
    restarted,
)

M = TypeVar("M")

# of thresholds, below which a difference is not worth another plan
_NEAR = 0.02
# what a cluster may fail with; anything else is a bug and ends the loop
FAILURES = (RayClusterError, OSError)

_log = logging.getLogger(__name__)


class Timer(Protocol):
    """Something that will happen once, unless it is called off."""

    def call_off(self) -> None:
        """Cancel it."""


class Timers(Protocol):
    """A way to be called later."""

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
class LoopLimits:
    """What the loop may do.

    Attributes:
        acts: whether plans are applied, or only made.
        most_scales: pools that one round scales at most.
        apply_timeout_s: in which the replicas of a plan should be ready; growth that is not is
            rolled back.
    """

    acts: bool = True
    most_scales: int = 1_000
    apply_timeout_s: float = math.inf


NO_LIMITS = LoopLimits()


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did.

    Attributes:
        actions: that were asked for; None without a state to plan for.
        failures: of actions, in words.
        is_applied: whether the loop acted; else the actions are what it would have done.
        overdue: pools whose planned replicas are not ready in time; those with a hold were rolled
            back in this round.
        holds: of pools that must not grow for now, since this round or an earlier one.
    """

    at_s: float
    plan: Plan
    actions: PlanDiff | None
    failures: tuple[str, ...] = ()
    is_applied: bool = True
    overdue: tuple[Overdue, ...] = ()
    holds: tuple[Hold, ...] = ()


class ControlLoop(Generic[M]):
    """Rounds of planning for one cluster.

    Args:
        clock: seconds; it never goes back.
        on_round: called with every round's report.
        applied: the plan that the cluster has already, if any.
        memory: of an earlier loop's planner, if any.
        limits: asked in every round.
    """

    def __init__(
        self,
        planner: Planner[M],
        cluster: Cluster,
        clock: Callable[[], float],
        *,
        on_round: Callable[[RoundReport], None] = lambda _: None,
        applied: Plan | None = None,
        memory: M | None = None,
        limits: Callable[[], LoopLimits] = lambda: NO_LIMITS,
    ) -> None:
        self._planner = planner
        self._cluster = cluster
        self._clock = clock
        self._on_round = on_round
        self._applied = applied or Plan()
        self._wanted = self._applied
        self._state: ClusterState | None = None
        self._memory = memory
        self._limits = limits
        self._timer: Timer | None = None
        self._growths: Growths = ()

    @property
    def applied(self) -> Plan:
        """The plan as far as it was applied."""
        return self._applied

    @property
    def state(self) -> ClusterState | None:
        return self._state

    @property
    def memory(self) -> M | None:
        """The planner's; None before the first round."""
        return self._memory

    def start(self, timers: Timers, period_s: float) -> None:
        """Run a round now, and one every period, by timers that act one after the other."""
        # first the next one: whatever this round does, the loop goes on
        self._timer = timers.after(period_s, lambda: self.start(timers, period_s))
        self.run_round()

    def stop(self) -> None:
        """Run no more rounds; the cluster stays as it is."""
        if self._timer is not None:
            self._timer.call_off()

    def run_round(self) -> RoundReport:
        report = self._round()
        for failure in report.failures:
            _log.warning("round at %.1f s: %s; it is tried again", report.at_s, failure)
        for one in report.overdue:
            _log.warning("round at %.1f s: the plan is not applied: %s", report.at_s, one.words)
            if (words := one.rollback_words(report.at_s)) is not None:
                _log.warning("round at %.1f s: rolled back: %s", report.at_s, words)
        self._on_round(report)
        return report

    def _round(self) -> RoundReport:
        try:
            state = self._cluster.observe()
        except FAILURES as error:
            now_s, failure = self._clock(), f"cannot observe: {error}"
            holds = tuple(holds_of(self._growths, now_s))
            return RoundReport(now_s, self._wanted, None, (failure,), holds=holds)
        self._state = state
        if state.in_force is not None:
            self._applied = state.in_force
        memory = self._planner.begin(state) if self._memory is None else self._memory
        plan, self._memory = self._planner.plan(state, memory)
        plan = settled(self._applied, plan, within=_NEAR)
        limits, now_s = self._limits(), self._clock()
        overdue = self._judge(plan, state, limits, now_s)
        self._wanted = self._versioned(held_back(plan, self._growths, now_s))
        actions = bounded(diff(self._applied, self._wanted), limits.most_scales)
        before = self._applied
        failures = tuple(self._apply(actions)) if limits.acts else ()
        if limits.acts:
            targets = Targets(before, self._applied)
            self._growths = noted(self._growths, self._wanted, targets, state, now_s)
        return RoundReport(
            now_s,
            self._wanted,
            actions,
            failures,
            is_applied=limits.acts,
            overdue=overdue,
            holds=tuple(holds_of(self._growths, now_s)),
        )

    def _judge(
        self, plan: Plan, state: ClusterState, limits: LoopLimits, now_s: float
    ) -> tuple[Overdue, ...]:
        """Note what is rolled back, and return what is overdue; nothing of a loop that is idle."""
        if not limits.acts:
            self._growths = restarted(self._growths, now_s)
            return ()
        patience = Patience(now_s, limits.apply_timeout_s)
        self._growths, overdue = judge(self._growths, plan, self._applied, state, patience)
        return overdue

    def _versioned(self, plan: Plan) -> Plan:
        """The plan with the version of the last one, or the next if anything is different."""
        before, in_force = self._wanted.version, self._applied.version
        same = replace(plan, version=before)
        if same == self._wanted and in_force <= before:
            return same
        return replace(same, version=max(before, in_force) + 1)

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
