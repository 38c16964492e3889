"""Ray Serve's autoscaling by ongoing requests, each deployment for itself.

The default policy of Ray Serve 2.60 (``ray.serve.autoscaling_policy``) in its figures: the wanted
number of replicas is requests, queued and running, over the target per replica, averaged over a
look-back window; a change is scaled by a factor; and it is made once it was wanted without a break
for a delay. Serve decides every 0.1 s; here every round of the loop does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.policies.planning.plan import Plan, PoolPlan


@dataclass(frozen=True, slots=True)
class Deployment:
    """Memory of one pool.

    Attributes:
        target: replicas that were asked for last.
        samples: instants and ongoing requests within the look-back window.
        wants_up: direction of the change that is wanted; None for none.
        since_s: from when on it was wanted.
    """

    pool: str
    target: int
    samples: tuple[tuple[float, int], ...] = ()
    wants_up: bool | None = None
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OngoingRequestsPlanner:
    """The planner; defaults are Ray Serve's.

    Attributes:
        max_batch: of every pool, by its name.
    """

    fleet: Fleet
    max_batch: tuple[tuple[str, int], ...]
    target_ongoing_requests: float = 2.0
    min_replicas: int = 1
    max_replicas: int = 100
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    look_back_s: float = 30.0

    def begin(self, state: ClusterState) -> tuple[Deployment, ...]:
        return tuple(
            Deployment(spec.name, max(self.min_replicas, state.pool(spec.name).num_replicas))
            for spec in self.fleet.pools
        )

    def plan(
        self, state: ClusterState, memory: tuple[Deployment, ...]
    ) -> tuple[Plan, tuple[Deployment, ...]]:
        after = tuple(
            self._decide(one, spec, state)
            for one, spec in zip(memory, self.fleet.pools, strict=True)
        )
        batches = dict(self.max_batch)
        pools = tuple(PoolPlan(one.pool, one.target, batches[one.pool]) for one in after)
        return Plan(pools), after

    def _decide(self, memory: Deployment, spec: PoolSpec, state: ClusterState) -> Deployment:
        seen, now_s = state.model(spec.model), state.now_s
        ongoing = seen.num_waiting + seen.num_in_batches
        kept = [one for one in memory.samples if one[0] > now_s - self.look_back_s]
        samples = (*kept, (now_s, ongoing))
        average = sum(number for _, number in samples) / len(samples)
        running = state.pool(spec.name).num_ready
        desired = self._desired(average, running, memory.target)
        target, wants_up, since_s = self._delayed(desired, memory, now_s)
        return Deployment(memory.pool, target, samples, wants_up, since_s)

    def _desired(self, average: float, num_running: int, target: int) -> int:
        """Replicas for so many ongoing requests, within bounds."""
        if num_running == 0:
            return target
        desired = average / self.target_ongoing_requests
        change = desired - num_running
        factor = self.upscaling_factor if change > 0 else self.downscaling_factor
        scaled = math.ceil(num_running + factor * change)
        if math.ceil(desired) < num_running and scaled == num_running:
            scaled -= 1
        return min(self.max_replicas, max(self.min_replicas, scaled))

    def _delayed(
        self, desired: int, memory: Deployment, now_s: float
    ) -> tuple[int, bool | None, float]:
        """The target, and the change that is still waited for."""
        if desired == memory.target:
            return memory.target, None, now_s
        wants_up = desired > memory.target
        since_s = memory.since_s if memory.wants_up == wants_up else now_s
        delay_s = self.upscale_delay_s if wants_up else self.downscale_delay_s
        if now_s - since_s + 1e-6 >= delay_s:
            return desired, None, now_s
        return memory.target, wants_up, since_s
