"""The plan loop's view of a cluster: counters, queues, replicas and GPUs at one instant."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_cluster.policies.planning.plan import Plan

# batches that the table itself counts for, and after how many batches one is forgotten
_PRIOR, _MEMORY = 10, 500


@dataclass(frozen=True, slots=True)
class DeviceState:
    """GPUs of one type that can be used, busy or not; hundredths where replicas share them."""

    device: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """Replicas of one model on one type of GPU.

    Attributes:
        num_ready: that serve.
        num_loading: that will.
        num_young: of both, those that are younger than the dwell time.
        pace: observed over expected seconds of a batch.
        spread: standard deviation of these seconds, over what they should be.
    """

    pool: str
    num_ready: int
    num_loading: int = 0
    num_young: int = 0
    pace: float = 1.0
    spread: float = 0.0

    @property
    def num_replicas(self) -> int:
        return self.num_ready + self.num_loading


@dataclass(frozen=True, slots=True)
class ModelState:
    """The queue of one model, over all of its pools.

    Attributes:
        num_waiting: images in no batch yet.
        num_in_batches: images that are being made.
    """

    model: str
    num_waiting: int = 0
    num_in_batches: int = 0


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Counters of one service since it started, and confidences since the last observation.

    Attributes:
        num_direct: requests that skip the cascade, of those that arrived.
        num_alone: requests that only the cascade's light model makes, of those that arrived.
        num_missed: requests that ended late or not at all.
        confidences: of all images of the light model.
    """

    service: str
    num_arrived: float
    num_direct: float = 0
    num_missed: int = 0
    confidences: tuple[float, ...] = ()
    num_alone: float = 0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster at one instant.

    Attributes:
        in_force: the plan as far as it is applied, where the cluster says so: counts that somebody
            else has changed are seen in it.
    """

    now_s: float
    devices: tuple[DeviceState, ...]
    pools: tuple[PoolState, ...]
    models: tuple[ModelState, ...]
    services: tuple[ServiceState, ...]
    in_force: Plan | None = None

    def pool(self, name: str) -> PoolState:
        """Return a pool's state; an unknown one has no replicas."""
        found = [one for one in self.pools if one.pool == name]
        return found[0] if found else PoolState(name, 0)

    def model(self, name: str) -> ModelState:
        """Return a model's queue; an unknown one's is empty."""
        found = [one for one in self.models if one.model == name]
        return found[0] if found else ModelState(name)

    def service(self, name: str) -> ServiceState:
        """Return a service's counters; an unknown one has none."""
        found = [one for one in self.services if one.service == name]
        return found[0] if found else ServiceState(name, 0)

    def num_gpus(self, device: str) -> int:
        return sum(one.num_gpus for one in self.devices if one.device == device)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Running mean and variance of the ratios of observed to expected seconds of batches.

    Attributes:
        num: batches that count, the prior's among them.
    """

    num: float = _PRIOR
    mean: float = 1.0
    variance: float = 0.0

    @property
    def spread(self) -> float:
        return math.sqrt(self.variance) / self.mean


def observe_batch(times: BatchTimes, *, took_s: float, expected_s: float) -> BatchTimes:
    """Return the estimate after one more batch (West, 1979, with forgetting).

    Raises:
        ValueError: one of the two is not positive.
    """
    if took_s <= 0 or expected_s <= 0:
        raise ValueError(f"batches take time; given {took_s:g} s, {expected_s:g} s expected")
    num = min(times.num + 1, _MEMORY)
    off = took_s / expected_s - times.mean
    mean = times.mean + off / num
    variance = (1 - 1 / num) * (times.variance + off * off / num)
    return BatchTimes(num, mean, variance)
