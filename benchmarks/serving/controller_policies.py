"""Policies for the simulated day, and the cell that they plan: as fast as the live one was.

Costs are those that the live cell's dispatcher has learnt, as the controller reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.serving.controller_comparison import OURS, STATIC, Live
from benchmarks.serving.controller_service import HEAVY
from benchmarks.serving.controller_watch import (
    DIFFSERVE,
    Round,
    SlotPlanner,
    chosen_settings,
    curves_of,
    diffserve,
    light_first,
    replicas_within,
    slot_fleet,
)
from ray_cluster.control.cell_fleet import CellFleet, fleet_of, images_s, share_of
from ray_cluster.control.live import LivePlanner
from ray_cluster.control.records import Glance
from ray_cluster.policies.baselines.fixed_cascades import FixedPlanner
from ray_cluster.policies.baselines.ongoing_requests import OngoingRequestsPlanner
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.policies.planning.plan import CascadePlan, Plan, PoolPlan
from ray_cluster.policies.planning.planner import Planner
from ray_cluster.protocol.controller import Observation, ObservedPool
from ray_cluster.simulator.cascade.policies import CASCADE_POLICIES

# of the simulator's other policies, beside Ray Serve's formula over the queue
BASELINES: Mapping[str, str] = {
    # provisioned for the peak: not the settings' threshold
    "static": "diffserve-static",
    **{
        name: name
        for name in (
            *("proteus", "static-threshold", "aimd", "queue-1", "queue-2"),
            *("all-light", "all-heavy"),
        )
    },
}
SERVE = "serve-queue"


class Costs(NamedTuple):
    """What a simulated cell is like.

    Attributes:
        seen: the live cell's models at one instant; none of them is at work.
        fleet: them, light ones first; a replica takes what it reserves live.
        supply: hundredths of CPUs for them.
        paces: by pool, how many times as long as by the fleet images took live.
    """

    seen: Observation
    fleet: Fleet
    supply: int
    paces: Mapping[str, float] = MappingProxyType({})

    @property
    def as_it_ran(self) -> Fleet:
        """The fleet with the seconds that images took live; planners do not know them."""
        return replace(self.fleet, pools=tuple(map(self._paced, self.fleet.pools)))

    def _paced(self, pool: PoolSpec) -> PoolSpec:
        pace = self.paces.get(pool.name, 1.0)
        options = (replace(one, seconds=pace * one.seconds) for one in pool.options)
        return replace(pool, options=tuple(options))

    @property
    def num_slots(self) -> int:
        """Replicas that there are CPUs for."""
        return replicas_within(self.supply, [one.gpus_per_replica for one in self.fleet.pools])

    @property
    def glance(self) -> Glance:
        """The cell as planners of live cells get it."""
        nothing = ClusterState(0.0, (), (), (), ())
        return Glance(self.seen, CellFleet(self.fleet, ()), nothing)

    def image_s(self, model: str) -> float:
        """Return the seconds of one image of a model alone."""
        return next(one.options[0].seconds for one in self.fleet.pools if one.model == model)


@dataclass(frozen=True, slots=True)
class AsServed:
    """A planner whose cascades are run as the live dispatcher runs them.

    There the settings say how slack counts, and what is published for a heavy image that does not
    come.

    Attributes:
        cascade: of a plan without one; of one with, how slack counts and what is published.
        caps: most images of a batch, by pool, for planners that count on live batches.
    """

    planner: Planner[Any]
    cascade: CascadePlan
    caps: Mapping[str, int] = field(default_factory=dict)

    def begin(self, state: ClusterState) -> Any:
        return self.planner.begin(state)

    def plan(self, state: ClusterState, memory: Any) -> tuple[Plan, Any]:
        plan, memory = self.planner.plan(state, memory)
        served = tuple(
            replace(one, reserve_s=self.cascade.reserve_s, when_late=self.cascade.when_late)
            for one in plan.cascades or (self.cascade,)
        )
        pools = tuple(
            replace(one, max_batch=min(one.max_batch, self.caps.get(one.pool, one.max_batch)))
            for one in plan.pools
        )
        return replace(plan, pools=pools, cascades=served), memory


class Asked(NamedTuple):
    """What the simulator's policies know of an experiment."""

    num_gpus: int
    peak_per_s: float


def costs_of(rounds: Sequence[Round]) -> Costs:
    """Return a cell as it was in the round whose heavy images took the median of seconds.

    Raises:
        ValueError: no round has seen both models.
    """
    rounds = [one for one in rounds if _has_both(one)]
    if not rounds:
        raise ValueError("the watcher has never seen both models")
    found = [_costs(one) for one in rounds]
    middle = sorted(found, key=lambda one: one.image_s(HEAVY))[len(found) // 2]
    paces = {
        pool.name: _pace(pool, rounds, [one.fleet.pools[number] for one in found])
        for number, pool in enumerate(middle.fleet.pools)
    }
    return middle._replace(paces=paces)


def _pace(typical: PoolSpec, rounds: Sequence[Round], pools: Sequence[PoolSpec]) -> float:
    """Return how many times as long images took as a pool says that is typical of all rounds.

    Others compute while many images are made: steps are learnt to take longer then, and images take
    longer than was predicted by them. Each round counts by the images in its batches.

    Args:
        pools: as they were in each round.
    """
    took_s = typical_s = 0.0
    for one, pool in zip(rounds, pools, strict=True):
        queue = one.seen.queue(pool.model)
        num_images = min(queue.num_leased, pool.options[-1].batch)
        took_s += num_images * queue.safety_factor * pool.batch_s(max(1, num_images))
        typical_s += num_images * typical.batch_s(max(1, num_images))
    return took_s / typical_s if typical_s else 1.0


def _costs(one: Round) -> Costs:
    seen = models_alone(one.seen)
    fleet = fleet_of(seen, curves_of).fleet
    [service] = fleet.services
    assert service.cascade is not None
    cascade = replace(service.cascade, discriminate_s=_score_s(one.seen), num_scorers=1)
    fleet = replace(fleet, pools=light_first(fleet), services=(replace(service, cascade=cascade),))
    judges = sum(
        share_of(pool) * max(1, len(pool.replicas))
        for pool in one.seen.pools
        if pool.kind == "score"
    )
    return Costs(seen, fleet, one.supply - judges)


def _has_both(one: Round) -> bool:
    return any(spec.cascade for spec in fleet_of(one.seen, curves_of).fleet.services)


def models_alone(seen: Observation) -> Observation:
    """Return a cell's models without what they call; none of them is at work."""

    def idle(pool: ObservedPool) -> ObservedPool:
        return replace(pool, replicas=tuple(replace(one, num_held=0) for one in pool.replicas))

    return replace(seen, pools=tuple(idle(one) for one in seen.pools if one.kind == "denoise"))


def _score_s(seen: Observation) -> float:
    """Return the seconds of one image in the discriminator."""
    [judge] = [one for one in seen.pools if one.kind == "score"]
    typical = next(one.typical for one in seen.pools if one.typical is not None)
    small = replace(typical, num_steps=1, uses_guidance=False)
    return images_s(judge.step_cost, small, 1)


def ours(costs: Costs, reserve_s: float) -> AsServed:
    """Return the live planner, with the cell's settings."""
    caps = {one.pool: one.max_batch for one in first_replicas(costs.fleet)}
    planner = LivePlanner(lambda: costs.glance)
    return AsServed(planner, _cascade(costs.fleet, 1.0, reserve_s), caps)


def in_replicas(costs: Costs, planner: Planner[Any]) -> Planner[Any]:
    """Return a planner whose replicas take one device each, for this cell."""
    if isinstance(planner, FixedPlanner):
        return planner
    return SlotPlanner(lambda: costs.glance, lambda _: planner)


def static(costs: Costs, threshold: float, reserve_s: float) -> FixedPlanner:
    """Return a plan of one replica of each model, that never changes."""
    return FixedPlanner(
        Plan(first_replicas(costs.fleet), (_cascade(costs.fleet, threshold, reserve_s),))
    )


def by_serve(costs: Costs, threshold: float, reserve_s: float) -> AsServed:
    """Return Ray Serve's formula over each model's queue, with the settings' threshold."""
    caps = tuple((one.name, _cap(one, costs.fleet)) for one in costs.fleet.pools)
    settings = chosen_settings("autoscaling", "ongoing-requests")
    planner = OngoingRequestsPlanner(
        costs.fleet,
        caps,
        max_replicas=costs.num_slots,
        **settings,  # type: ignore[arg-type]
    )
    return AsServed(planner, _cascade(costs.fleet, threshold, reserve_s))


def planners(
    live: Mapping[str, Live], peak_per_s: float
) -> Iterator[tuple[str, Costs, Planner[Any]]]:
    """Yield every policy, with the costs of its own live run, or else of the controller's.

    Args:
        peak_per_s: the highest rate of the day.
    """
    costs = {name: costs_of(one.rounds) for name, one in live.items()}
    common = costs[OURS]
    [given] = costs[STATIC].seen.cascades
    threshold, reserve_s = given.threshold or 0.0, given.reserve_s or 0.0
    yield OURS, common, ours(common, reserve_s)
    yield STATIC, costs[STATIC], static(costs[STATIC], threshold, reserve_s)
    own = costs[DIFFSERVE]
    published = diffserve(slot_fleet(own.fleet), chosen_settings("cascade", DIFFSERVE))
    # a live cell that looks at no slack publishes no light image either
    no_slack = replace(_cascade(own.fleet, 1.0, 0.0), reserve_s=None, when_late="drop")
    yield DIFFSERVE, own, AsServed(in_replicas(own, published), no_slack)
    asked = Asked(common.num_slots, peak_per_s)
    for policy in CASCADE_POLICIES:
        if policy.name in BASELINES:
            settings = chosen_settings("cascade", policy.name)
            try:
                planner = policy.build(slot_fleet(common.fleet), asked, **settings)
            except ValueError:
                # no threshold carries the peak within the deadline
                continue
            yield BASELINES[policy.name], common, in_replicas(common, planner)
    yield SERVE, common, by_serve(common, threshold, reserve_s)


def first_replicas(fleet: Fleet) -> tuple[PoolPlan, ...]:
    """One replica of each model."""
    return tuple(PoolPlan(one.name, 1, _cap(one, fleet)) for one in fleet.pools)


def _cap(pool: PoolSpec, fleet: Fleet) -> int:
    """Return the largest batch that a deferred image has time for, after the batch before it.

    A live batch takes in who comes while it runs; one that is simulated does not, and the largest
    would leave no image any slack.
    """
    [service] = fleet.services
    by_model = {one.model: one.options[0].seconds for one in fleet.pools}
    left_s = service.slo_s - sum(by_model.values()) + by_model[pool.model]
    fitting = [one.batch for one in pool.options if 2 * one.seconds <= left_s]
    return max(fitting, default=pool.options[0].batch)


def _cascade(fleet: Fleet, threshold: float, reserve_s: float) -> CascadePlan:
    [service] = fleet.services
    return CascadePlan(service.name, threshold, reserve_s=reserve_s, when_late="light")
