"""Replicas of what models call: discriminators and ControlNets, by the demand of who calls them.

Their number follows from arrivals alone, whatever else is planned: so they are sized first, and
models share what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.cluster_state import ClusterState, DeviceState
from ray_cluster.policies.plan import PoolPlan

# of a replica's time, that is counted on: calls come unevenly, and a step waits for the answer
_UTILISATION = 0.7


@dataclass(frozen=True, slots=True)
class HelperSpec:
    """A pool that other pools' replicas call.

    Attributes:
        counters: names whose arrivals call it.
        rate_per_s: calls that a busy replica answers.
        max_batch: calls that it answers together at most.
        gpus_per_replica: in the units of the device's :class:`DeviceState`.
        min_replicas: fewest; none stops the last one, for whoever calls it waits.
    """

    name: str
    device: str
    counters: tuple[str, ...]
    rate_per_s: float
    max_batch: int
    gpus_per_replica: int = 1
    min_replicas: int = 1

    def __post_init__(self) -> None:
        if not (self.rate_per_s > 0 and self.gpus_per_replica >= 1):
            raise ValueError(f"{self.name} needs a rate and a share of a device; given {self}")


def size_helpers(
    helpers: Sequence[HelperSpec], demand_per_s: Mapping[str, float], state: ClusterState
) -> tuple[PoolPlan, ...]:
    """Return the replicas of each helper.

    One replica fewer is taken only where the demand would fit even with half of what is spare, so
    that demand around a limit starts and stops nothing.

    Args:
        demand_per_s: calls by counter; of one that is not in it nothing is known yet.
    """
    return tuple(_size(one, demand_per_s, state) for one in helpers)


def _size(spec: HelperSpec, demand_per_s: Mapping[str, float], state: ClusterState) -> PoolPlan:
    demand = sum(demand_per_s.get(name, 0.0) for name in spec.counters)
    seen = state.pool(spec.name)
    needed = max(spec.min_replicas, math.ceil(demand / (_UTILISATION * spec.rate_per_s)))
    if not all(name in demand_per_s for name in spec.counters):
        # a planner that has just begun must not take nothing seen for nothing wanted
        needed = max(spec.min_replicas, seen.num_replicas)
    elif needed < seen.num_replicas:
        cautious = math.ceil(demand / (_UTILISATION**2 * spec.rate_per_s))
        needed = min(seen.num_replicas, max(needed, cautious, seen.num_young))
    supply = state.num_gpus(spec.device) // spec.gpus_per_replica
    return PoolPlan(spec.name, min(needed, supply), spec.max_batch)


def without_helpers(
    state: ClusterState, helpers: Sequence[HelperSpec], plans: Sequence[PoolPlan]
) -> ClusterState:
    """Return the state as it is for the models: with the devices that helpers leave to them."""
    used = {one.device: 0 for one in state.devices}
    for spec, plan in zip(helpers, plans, strict=True):
        used[spec.device] += plan.num_replicas * spec.gpus_per_replica
    devices = tuple(
        DeviceState(one.device, max(0, one.num_gpus - used[one.device])) for one in state.devices
    )
    return replace(state, devices=devices)
