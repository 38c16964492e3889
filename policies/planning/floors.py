"""The fewest replicas that a plan must leave each pool, whatever else it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Floor:
    """The fewest replicas of a pool.

    Attributes:
        gpus_per_replica: in the units of the device's :class:`DeviceState`.
    """

    pool: str
    device: str
    gpus_per_replica: int
    num_replicas: int


def above_floors(plan: Plan, floors: Sequence[Floor], state: ClusterState) -> Plan:
    """Return a plan in which no pool is below its floor as far as the floors fit.

    What lacks is taken from the pools that are furthest above theirs. A plan that keeps the floors
    is returned as it is, however short it is otherwise.

    Args:
        floors: of all pools of the plan; where they do not fit together, the first ones count.
    """
    sizes = {one.pool: one.num_replicas for one in plan.pools}
    fewest = _that_fit(floors, state)
    if all(sizes.get(pool, 0) >= num for pool, num in fewest.items()):
        return plan
    left = {one.device: one.num_gpus for one in state.devices}
    for one in floors:
        sizes[one.pool] = max(sizes.get(one.pool, 0), fewest[one.pool])
        left[one.device] -= sizes[one.pool] * one.gpus_per_replica
    for device in [one.device for one in state.devices]:
        here = [one for one in floors if one.device == device]
        while left[device] < 0:
            most = max(here, key=lambda one: sizes[one.pool] - fewest[one.pool])
            if sizes[most.pool] == fewest[most.pool]:
                break
            sizes[most.pool] -= 1
            left[device] += most.gpus_per_replica
    pools = tuple(replace(one, num_replicas=sizes[one.pool]) for one in plan.pools)
    return replace(plan, pools=pools)


def _that_fit(floors: Sequence[Floor], state: ClusterState) -> dict[str, int]:
    """Return the fewest replicas by pool, no more than fit behind those before."""
    left = Counter({one.device: one.num_gpus for one in state.devices})
    found = {}
    for one in floors:
        num = min(one.num_replicas, max(0, left[one.device]) // one.gpus_per_replica)
        left[one.device] -= num * one.gpus_per_replica
        found[one.pool] = num
    return found
