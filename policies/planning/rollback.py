"""What becomes of a pool's growth whose replicas are not ready in time.

It is rolled back to what is ready, and the pool is held there for a while, which doubles with every
failure in a row. Other pools are not affected. A round of the plan loop calls `judge` before it
acts, `held_back` on its plan, and `noted` after it has acted; `restarted` if it must not act.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.plan import Plan

# a hold is at most 2 ** 4 timeouts long
_MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class Awaited:
    """Replicas that a pool is to have, and that are not ready yet.

    Attributes:
        num_kept: that stay in a rollback: the target before, or what was ready if that was more.
            All of them where replicas are missing without a growth.
        since_s: when the cluster was asked for them; until it is, when they were planned.
    """

    num_replicas: int
    num_kept: int
    since_s: float
    is_asked: bool

    @property
    def is_growth(self) -> bool:
        return self.num_kept < self.num_replicas


@dataclass(frozen=True, slots=True)
class Hold:
    """What a rolled-back pool may have for a while.

    Attributes:
        num_failures: growths in a row that were rolled back.
    """

    pool: str
    num_replicas: int
    until_s: float
    num_failures: int = 1


@dataclass(frozen=True, slots=True)
class PoolGrowth:
    """The memory of one pool.

    Attributes:
        awaited: the fewest replicas first, which is the oldest first; none that are ready.
        hold: of the last rollback, also once it is over, until a growth succeeds.
    """

    pool: str
    awaited: tuple[Awaited, ...] = ()
    hold: Hold | None = None

    def held(self, now_s: float) -> Hold | None:
        """Return the hold, unless it is over."""
        return self.hold if self.hold is not None and now_s < self.hold.until_s else None


Growths = tuple[PoolGrowth, ...]


@dataclass(frozen=True, slots=True)
class Overdue:
    """Planned replicas that are not ready in time.

    Attributes:
        num_target: the pool's target until now.
        hold: if this is rolled back; None where nothing that was asked for can be given up.
    """

    pool: str
    num_ready: int
    num_replicas: int
    after_s: float
    num_target: int
    hold: Hold | None = None

    @property
    def words(self) -> str:
        return (
            f"{self.num_ready} of {self.num_replicas} replicas of {self.pool} are ready after "
            f"{self.after_s:.0f} s"
        )

    def rollback_words(self, now_s: float) -> str | None:
        """Say what is rolled back and for how long; None if nothing is."""
        if (hold := self.hold) is None:
            return None
        return (
            f"{self.pool}: back from {self.num_target} to {hold.num_replicas} replicas, and no "
            f"more for {hold.until_s - now_s:.0f} s"
        )


class Judged(NamedTuple):
    """What is still awaited, and what is overdue."""

    growths: Growths
    overdue: tuple[Overdue, ...]


@dataclass(frozen=True, slots=True)
class Patience:
    """The present, and the seconds in which planned replicas must be ready."""

    now_s: float
    timeout_s: float

    def is_late(self, one: Awaited) -> bool:
        return self.now_s - one.since_s > self.timeout_s

    def hold_s(self, num_failures: int) -> float:
        """Return for how long a pool is held after so many failures in a row."""
        return self.timeout_s * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS)


def judge(
    growths: Growths, wanted: Plan, applied: Plan, state: ClusterState, patience: Patience
) -> Judged:
    """Return what is overdue, and what of it is rolled back.

    Args:
        growths: after the round before.
        wanted: what this round would like to have; nothing beyond it is awaited.
        applied: the targets in force.
    """
    known = {one.pool: one for one in growths}
    found: list[PoolGrowth] = []
    overdue: list[Overdue] = []
    for pool in wanted.pools:
        num_ready = state.pool(pool.pool).num_ready
        one = _lowered(known.get(pool.pool, PoolGrowth(pool.pool)), pool.num_replicas)
        one = _without_ready(one, num_ready, patience.now_s)
        late = [awaited for awaited in one.awaited if patience.is_late(awaited)]
        if late:
            num_target = applied.num_replicas(pool.pool)
            hold = _hold(one, late, num_ready, num_target, patience)
            after_s = patience.now_s - late[-1].since_s
            overdue.append(
                Overdue(one.pool, num_ready, late[-1].num_replicas, after_s, num_target, hold)
            )
            if hold is not None:
                one = _lowered(replace(one, hold=hold), hold.num_replicas)
                one = _without_ready(one, num_ready, patience.now_s)
        found.append(one)
    return Judged(tuple(found), tuple(overdue))


def _lowered(one: PoolGrowth, most: int) -> PoolGrowth:
    """Await no more than a plan has; a lower plan does not restart the time of an older one."""
    by_number: dict[int, Awaited] = {}
    for awaited in one.awaited:
        number = min(awaited.num_replicas, most)
        kept = min(awaited.num_kept, number)
        by_number.setdefault(number, replace(awaited, num_replicas=number, num_kept=kept))
    return replace(one, awaited=tuple(by_number.values()))


def _without_ready(one: PoolGrowth, num_ready: int, now_s: float) -> PoolGrowth:
    """Await what is not ready; a growth that succeeds outside a hold ends the row of failures."""
    left = tuple(awaited for awaited in one.awaited if awaited.num_replicas > num_ready)
    has_grown = any(awaited.is_growth for awaited in one.awaited if awaited not in left)
    forgets = has_grown and one.held(now_s) is None
    return replace(one, awaited=left, hold=None if forgets else one.hold)


def _hold(
    one: PoolGrowth, late: Sequence[Awaited], num_ready: int, num_target: int, patience: Patience
) -> Hold | None:
    """Return the hold of a rollback; None if nothing that was asked for can be given up."""
    failed = next((awaited for awaited in late if awaited.is_growth), None)
    if failed is None or num_target <= (back := max(num_ready, failed.num_kept)):
        return None
    num_failures = 1 if one.hold is None else one.hold.num_failures + 1
    # a pool that would have none left is tried again soon, however often it has failed
    hold_s = patience.hold_s(num_failures if back else 1)
    return Hold(one.pool, back, patience.now_s + hold_s, num_failures)


def held_back(plan: Plan, growths: Growths, now_s: float) -> Plan:
    """Return a plan in which held pools have no more replicas than they may."""
    holds = {hold.pool: hold.num_replicas for hold in holds_of(growths, now_s)}
    pools = (
        replace(one, num_replicas=min(one.num_replicas, holds.get(one.pool, one.num_replicas)))
        for one in plan.pools
    )
    return replace(plan, pools=tuple(pools))


def holds_of(growths: Growths, now_s: float) -> Iterator[Hold]:
    """Yield the holds that are not over."""
    for one in growths:
        if (hold := one.held(now_s)) is not None:
            yield hold


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets in force before and after a round's actions."""

    before: Plan
    after: Plan


def noted(
    growths: Growths, wanted: Plan, targets: Targets, state: ClusterState, now_s: float
) -> Growths:
    """Return the memory after a round has acted.

    Args:
        growths: that `judge` has returned.
        wanted: the plan, held back.
    """
    known = {one.pool: one for one in growths}
    found = []
    for pool in wanted.pools:
        one = _lowered(known.get(pool.pool, PoolGrowth(pool.pool)), pool.num_replicas)
        before, after = (plan.num_replicas(pool.pool) for plan in (targets.before, targets.after))
        awaited = [_asked(each, after, now_s) for each in one.awaited]
        num_ready = state.pool(pool.pool).num_ready
        if pool.num_replicas > max([num_ready, *(each.num_replicas for each in awaited)]):
            num_kept = min(pool.num_replicas, max(before, num_ready))
            is_asked = after >= pool.num_replicas
            awaited.append(Awaited(pool.num_replicas, num_kept, now_s, is_asked))
        found.append(replace(one, awaited=tuple(awaited)))
    return tuple(found)


def _asked(awaited: Awaited, num_asked: int, now_s: float) -> Awaited:
    """Time runs from when the cluster is first asked."""
    if awaited.is_asked or awaited.num_replicas > num_asked:
        return awaited
    return replace(awaited, since_s=now_s, is_asked=True)


def restarted(growths: Growths, now_s: float) -> Growths:
    """Return the memory after a round that must not act: time does not run meanwhile."""
    return tuple(
        replace(one, awaited=tuple(replace(each, since_s=now_s) for each in one.awaited))
        for one in growths
    )
