"""What operators are shown of a round of the plan loop: what is planned, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ray_cluster.control.cell_fleet import CellFleet
from ray_cluster.control.loop import RoundReport
from ray_cluster.policies.planning.cell_planner import CellMemory
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.demand import Demand, DemandSmoothing, forecast_per_s
from ray_cluster.policies.planning.fleet import PoolSpec
from ray_cluster.policies.planning.plan import CascadePlan, Plan, PlannedSettings, PoolPlan
from ray_cluster.protocol.controller import (
    HeldPool,
    Observation,
    PlannedPool,
    RoundMode,
    RoundRecord,
    ServiceDemand,
)


@dataclass(frozen=True, slots=True)
class Glance:
    """What one round has seen."""

    seen: Observation
    planned: CellFleet
    state: ClusterState


@dataclass(frozen=True, slots=True)
class Times:
    """When a round was, and how long it took.

    Attributes:
        at_s: Unix time.
        drain_s: in which its plan wants queues worked off.
    """

    at_s: float
    took_s: float
    drain_s: float


def record_of(
    report: RoundReport, glance: Glance | None, memory: CellMemory | None, times: Times
) -> RoundRecord:
    """Return the record of a round.

    Args:
        glance: None where nothing could be observed so far.
    """
    limits = None if glance is None else glance.seen.limits
    mode: RoundMode = "applied"
    if limits is not None and not report.is_applied:
        mode = "paused" if limits.is_paused else "dry_run"
    pools: tuple[PlannedPool, ...] = ()
    demand: tuple[ServiceDemand, ...] = ()
    if glance is not None and memory is not None:
        pools = tuple(_pools(report, glance, memory, times))
        demand = tuple(_demand(glance, memory))
    return RoundRecord(
        at_s=times.at_s,
        version=report.plan.version,
        took_s=times.took_s,
        mode=mode,
        pools=pools,
        cascades=_allowed(report.plan.cascades, glance),
        demand=demand,
        actions=tuple(_actions(report, glance)),
        failures=report.failures,
        overdue=tuple(one.words for one in report.overdue),
        infeasible=report.plan.infeasible,
        rollbacks=tuple(_rollbacks(report)),
        held=tuple(
            # the loop's clock is not Unix time
            HeldPool(
                one.pool,
                one.num_replicas,
                times.at_s + one.until_s - report.at_s,
                one.num_failures,
            )
            for one in report.holds
        ),
    )


def _rollbacks(report: RoundReport) -> Iterator[str]:
    for one in report.overdue:
        if (words := one.rollback_words(report.at_s)) is not None:
            yield words


def _actions(report: RoundReport, glance: Glance | None) -> Iterator[str]:
    if report.actions is None:
        return
    for one in report.actions.scales:
        yield f"{one.pool}: {one.num_before} to {one.num_after} replicas"
    if report.actions.settings is not None:
        before = (None if glance is None else glance.state.in_force) or Plan()
        wanted = report.actions.settings
        yield from setting_words(
            replace(before, cascades=_allowed(before.cascades, glance)),
            replace(wanted, cascades=_allowed(wanted.cascades, glance)),
        )


def _allowed(plans: Sequence[CascadePlan], glance: Glance | None) -> tuple[CascadePlan, ...]:
    """Return cascades' plans without thresholds that the settings' own are below.

    The dispatcher keeps to the lower one: what a planner follows from confidences above it never
    comes into force.
    """
    seen = () if glance is None else glance.seen.cascades
    most = {one.name: one.threshold for one in seen if one.threshold is not None}
    return tuple(_capped(one, most.get(one.service, math.inf)) for one in plans)


def _capped(plan: CascadePlan, most: float) -> CascadePlan:
    idle = plan.idle_threshold
    return replace(
        plan,
        threshold=math.inf if plan.threshold >= most else plan.threshold,
        idle_threshold=math.inf if idle is not None and idle >= most else idle,
    )


def setting_words(before: Plan, settings: PlannedSettings) -> Sequence[str]:
    """Say what batch caps and shares of deferred images become, and what they were."""
    found = []
    for name, batch in settings.max_batches:
        pool = before.pool(name)
        if pool is None or pool.max_batch != batch:
            was = "" if pool is None or not pool.max_batch else f"{pool.max_batch} to "
            found.append(f"{name}: {was}{batch} images a batch")
    for one in settings.cascades:
        cascade, share = before.cascade(one.service), _percent(one)
        if cascade is None:
            found.append(f"{one.service}: {share} % deferred")
        elif _percent(cascade) != share:
            found.append(f"{one.service}: {_percent(cascade)} to {share} % deferred")
        elif cascade.threshold != one.threshold:
            found.append(f"{one.service}: threshold {_limit(cascade)} to {_limit(one)}")
    return found or ["batch caps and thresholds"]


def _percent(cascade: CascadePlan) -> str:
    return f"{100 * cascade.deferral_rate:.0f}"


def _limit(cascade: CascadePlan) -> str:
    return "of the settings" if math.isinf(cascade.threshold) else f"{cascade.threshold:.3g}"


def _demand(glance: Glance, memory: CellMemory) -> Iterator[ServiceDemand]:
    specs = {one.name: one for one in glance.planned.fleet.services}
    for one in memory.services:
        spec = specs.get(one.service)
        models = [] if spec is None else [spec.model]
        models += [spec.cascade.heavy_model] if spec is not None and spec.cascade else []
        waiting = sum(glance.state.model(model).num_waiting for model in models)
        yield ServiceDemand(one.service, _per_s(one.demand), waiting)


def _per_s(demand: Demand) -> float | None:
    if demand.level_per_s is None:
        return None
    return forecast_per_s(demand, 0.0, DemandSmoothing())


def _pools(
    report: RoundReport, glance: Glance, memory: CellMemory, times: Times
) -> Iterator[PlannedPool]:
    plan, before = report.plan, glance.state.in_force or Plan()
    held = {one.pool: one.num_replicas for one in report.holds}
    loads = loads_of(plan, glance, memory, times.drain_s)
    specs = {one.name: one for one in glance.planned.fleet.pools}
    helpers = {one.name: one for one in glance.planned.helpers}
    calls = {one.counter: _per_s(one.demand) or 0.0 for one in memory.calls}
    paces = {one.pool: one.image_s for one in memory.paces}
    for one in plan.pools:
        load_s, load = 0.0, 0.0
        if (spec := specs.get(one.pool)) is not None:
            load, rate = loads.get(spec.model, 0.0), _rate(spec, one, paces.get(one.pool))
            load_s, fewest, most = spec.load_s, spec.min_replicas, spec.max_replicas
        else:
            helper = helpers[one.pool]
            load = sum(calls.get(name, 0.0) for name in helper.counters)
            rate, fewest, most = helper.rate_per_s, helper.min_replicas, None
        needed = math.ceil(load / rate - 1e-9)
        state = glance.state.pool(one.pool)
        yield PlannedPool(
            pool=one.pool,
            num_before=before.num_replicas(one.pool),
            num_ready=state.num_ready,
            num_planned=one.num_replicas,
            max_batch=one.max_batch,
            load_per_s=load,
            replica_per_s=rate,
            load_s=load_s,
            reason=reason_of(
                Counts(one.num_replicas, needed, fewest, most, state.num_young, held.get(one.pool)),
                is_short=plan.infeasible is not None,
            ),
        )


def _rate(spec: PoolSpec, plan: PoolPlan, image_s: float | None) -> float:
    """Images per second of a replica at the planned cap, as they were planned with.

    Args:
        image_s: seconds of one image alone, smoothed; None for those of this moment.
    """
    found = [one for one in spec.options if one.batch <= max(1, plan.max_batch)]
    alone_s = spec.options[0].seconds
    return max(one.rate_per_s for one in found or spec.options) * alone_s / (image_s or alone_s)


def loads_of(plan: Plan, glance: Glance, memory: CellMemory, drain_s: float) -> dict[str, float]:
    """Return the images per second that each model is to make, its queue among them."""
    known = {one.service: one for one in memory.services}
    found: dict[str, float] = {}
    for spec in glance.planned.fleet.services:
        if (one := known.get(spec.name)) is None:
            continue
        total, direct, alone = (_per_s(part) or 0.0 for part in (one.demand, one.direct, one.alone))
        entering = max(0.0, total - direct - alone)
        found[spec.model] = entering + alone
        if spec.cascade is not None:
            cascade = plan.cascade(spec.name)
            rate = 0.0 if cascade is None else cascade.deferral_rate
            found[spec.cascade.heavy_model] = rate * entering + direct
    return {
        model: load + glance.state.model(model).num_waiting / drain_s
        for model, load in found.items()
    }


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of a pool's replicas: planned, needed by the load alone, and bounds.

    Attributes:
        held: that it may have after a rollback; None where it is not held.
    """

    planned: int
    needed: int
    fewest: int
    most: int | None
    young: int
    held: int | None = None


def reason_of(counts: Counts, *, is_short: bool) -> str:
    """Say what a pool's number of replicas follows from.

    Args:
        is_short: whether some demand cannot be met.
    """
    planned = counts.planned
    if planned < counts.needed:
        if planned == counts.held:
            return f"apply_timeout_s: of {counts.needed}, no more were ready in time"
        if planned == counts.most:
            return f"max_replicas: the load would take {counts.needed}"
        more = "there are no more devices" if is_short else "the queue empties before one loads"
        return f"the load would take {counts.needed}, and {more}"
    if not planned:
        return "no load"
    if planned <= counts.needed:
        return "the load"
    if planned <= counts.fewest:
        return "min_replicas, or a replica at work that is not stopped"
    if planned <= counts.young:
        return "dwell_s: it has changed lately"
    return "headroom: bursts, deadlines, batches that are not full"
