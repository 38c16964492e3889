"""What an allocation is asked and what it answers: GPUs, pools, services and their demands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ray_cluster.policies.cascade import QualityCurve


@dataclass(frozen=True, slots=True)
class BatchOption:
    """A batch that a replica may be capped at, and the seconds it takes when it is full."""

    batch: int
    seconds: float

    def __post_init__(self) -> None:
        if self.batch < 1 or not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a batch needs 1 or more images and some seconds; given {self}")

    @property
    def rate_per_s(self) -> float:
        """Images per second of one busy replica."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class Supply:
    """GPUs of one type, or what else replicas reserve.

    Attributes:
        num_gpus: that can be used; hundredths of them, or of CPUs, where replicas share one: in the
            same units as :attr:`Pool.gpus_per_replica`.
        price: of one for a unit of time, a whole number.
    """

    device: str
    num_gpus: int
    price: int = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one model on one type of GPU, as many as the allocation will say.

    Attributes:
        options: batches it may be capped at.
        gpus_per_replica: in the supply's units.
        num_replicas: present ones, ready or loading.
        num_young: of these, those within their minimum lifetime.
        lost_share: part of the planning window in which a replica that is started now still loads.
        min_replicas: fewest, whatever the demand; fewer only where no more fit.
        max_replicas: None if only GPUs bound it.
    """

    name: str
    model: str
    device: str
    options: tuple[BatchOption, ...]
    gpus_per_replica: int = 1
    num_replicas: int = 0
    num_young: int = 0
    lost_share: float = 0.0
    max_replicas: int | None = None
    min_replicas: int = 0

    def __post_init__(self) -> None:
        if not self.options or not 0 <= self.lost_share <= 1 or self.gpus_per_replica < 1:
            raise ValueError(f"pool {self.name} needs options, GPUs and a share; given {self}")

    def best_within(self, seconds: float) -> BatchOption | None:
        """Return the option of most images per second among those no longer than that."""
        fitting = [one for one in self.options if one.seconds <= seconds + 1e-9]
        return max(fitting, key=lambda one: (one.rate_per_s, -one.batch), default=None)


@dataclass(frozen=True, slots=True)
class Stage:
    """One model on a request's way, with the images that wait for it."""

    model: str
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """Requests with one deadline that go one way: through a model, or through a cascade of two.

    Attributes:
        slo_s: from arrival to deadline.
        demand_per_s: requests that must be served.
        surge_per_s: requests that should be, if it costs no quality; no less than the demand.
        first: the model of all requests that do not skip a cascade.
        heavy: the model that a cascade defers to; None without a cascade.
        quality: of the cascade, over its deferral rate; required with ``heavy``.
        overhead_s: between the two models, such as the discriminator's.
        direct_per_s: requests beside the demand that skip to the heavy model.
        alone_per_s: requests beside the demand that only the first model makes.
        margin_s: of the deadline, reserved for noise.
        weight: of this service's quality among others'.
    """

    name: str
    slo_s: float
    demand_per_s: float
    first: Stage
    surge_per_s: float = 0.0
    heavy: Stage | None = None
    quality: QualityCurve | None = None
    overhead_s: float = 0.0
    direct_per_s: float = 0.0
    alone_per_s: float = 0.0
    margin_s: float = 0.0
    weight: int = 1

    def __post_init__(self) -> None:
        if (self.heavy is None) != (self.quality is None):
            raise ValueError(f"service {self.name} needs both a heavy model and its quality")

    @property
    def budget_s(self) -> float:
        """Seconds for batches and waiting."""
        return self.slo_s - self.margin_s - (self.overhead_s if self.heavy else 0.0)

    @property
    def surge_factor(self) -> float:
        """Surge over demand, 1 or more."""
        return max(1.0, self.surge_per_s / self.demand_per_s) if self.demand_per_s > 0 else 1.0

    @property
    def models(self) -> tuple[str, ...]:
        return (self.first.model, *((self.heavy.model,) if self.heavy else ()))


@dataclass(frozen=True, slots=True)
class AllocationProblem:
    """Everything that an allocation depends on.

    Attributes:
        drain_s: seconds in which present queues must be worked off.
        gain_per_start: thousandths of a service's quality range that a started replica must bring
            (hysteresis).

    Raises:
        ValueError: names repeat or are unknown, or two services share a model.
    """

    supplies: tuple[Supply, ...]
    pools: tuple[Pool, ...]
    services: tuple[Service, ...]
    drain_s: float = 10.0
    gain_per_start: int = 0

    def __post_init__(self) -> None:
        for what, names in self._names():
            repeated = [name for name, number in Counter(names).items() if number > 1]
            if repeated:
                raise ValueError(f"{what} must differ; given twice: {', '.join(repeated)}")
        if not self.drain_s > 0:
            raise ValueError(f"queues need some seconds to drain; given {self.drain_s}")
        unknown = {pool.device for pool in self.pools} - {one.device for one in self.supplies}
        if unknown:
            raise ValueError(f"pools are on devices that there are none of: {sorted(unknown)}")
        served = {pool.model for pool in self.pools}
        missing = [m for one in self.services for m in one.models if m not in served]
        if missing:
            raise ValueError(f"no pool has the models {missing}")

    def _names(self) -> Iterator[tuple[str, list[str]]]:
        yield "devices", [one.device for one in self.supplies]
        yield "pools", [one.name for one in self.pools]
        yield "services", [one.name for one in self.services]
        yield "models of services", [model for one in self.services for model in one.models]

    def most_replicas(self, pool: Pool) -> int:
        """Return how many replicas of a pool there may be, if there were no other pools."""
        supply = next(one.num_gpus for one in self.supplies if one.device == pool.device)
        fitting = supply // pool.gpus_per_replica
        return fitting if pool.max_replicas is None else min(fitting, pool.max_replicas)

    def fewest_replicas(self, pool: Pool) -> int:
        return min(pool.min_replicas, self.most_replicas(pool))

    def pools_of(self, model: str) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.model == model)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Replicas of a pool, and the most images that each batches."""

    name: str
    num_replicas: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best plan for a problem.

    Attributes:
        sizes: of every pool, in the problem's order.
        deferral_rates: of every cascade, by its service's name.
        infeasible: why demands and deadlines can't be met; then this plan leaves the least
            unserved.
        is_proven: whether no better plan exists; false if the search was cut short.
    """

    sizes: tuple[PoolSize, ...]
    deferral_rates: tuple[tuple[str, float], ...] = ()
    infeasible: str | None = None
    is_proven: bool = True

    def size(self, pool: str) -> PoolSize:
        return next(one for one in self.sizes if one.name == pool)

    def deferral_rate(self, service: str) -> float:
        """Return the deferral rate of a cascade; 0 for any other service."""
        return dict(self.deferral_rates).get(service, 0.0)
