"""Ranks of a group as actors, each in a bundle of the placement group of its head."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_cluster.config.loading import set_environment
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.deployments.serve.ray_environment import ALLOCATOR_ENVIRONMENT, MODEL_ENVIRONMENT
from ray_cluster.protocol.groups import GROUP_START, GroupStart
from ray_cluster.replica.group.processes import RankProcess, StartRank

# a bundle of nothing is none
_LEAST_CPUS = 0.001


def bundle_of(pool: PoolConfig) -> dict[str, float]:
    """Return what one rank of a pool reserves; its head is in the first rank's bundle."""
    bundle = {"CPU": max(_LEAST_CPUS, pool.num_cpus)}
    return bundle | ({"GPU": pool.num_gpus} if pool.num_gpus else {})


class _Rank:
    """One rank; the head's link, and not a call, says what it does."""

    def run(self, start: bytes) -> None:
        """Run until the head is gone; see :func:`ray_cluster.replica.group.rank.run_rank`."""
        set_environment(ALLOCATOR_ENVIRONMENT)
        # not above: seconds of imports, and the deployment's builder has no use for them
        from ray_cluster.replica.group.rank import run_rank

        run_rank(GROUP_START.decode(start))


class _Actor:
    def __init__(self, actor: Any, run: Any) -> None:
        self._actor, self._run = actor, run

    def has_ended(self) -> bool:
        ended, _ = ray.wait([self._run], timeout=0)
        return bool(ended)

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


def rank_starter(pool: PoolConfig) -> StartRank:
    """Return what starts the ranks of this replica's group.

    Raises:
        RuntimeError: when one is started and this process is in no placement group.
    """
    group = get_current_placement_group()

    def start_rank(start: GroupStart) -> RankProcess:
        if group is None:
            raise RuntimeError("a group's head is deployed with a placement group")
        options = {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "runtime_env": {"env_vars": MODEL_ENVIRONMENT},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=start.rank
            ),
        }
        actor: Any = ray.remote(_Rank).options(**options).remote()
        return _Actor(actor, actor.run.remote(GROUP_START.encode(start)))

    return start_rank
