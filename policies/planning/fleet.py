"""What there is to plan with: types of GPUs, pools, services with deadlines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A model on a type of GPU.

    Attributes:
        gpus_per_replica: in the units of the device's :class:`DeviceState`.
        options: batches it may be capped at, and their seconds.
        load_s: from the decision to start a replica until it serves.
        min_replicas, max_replicas: bounds on a plan; None for none.
    """

    name: str
    model: str
    device: str
    options: tuple[BatchOption, ...]
    gpus_per_replica: int = 1
    load_s: float = 0.0
    min_replicas: int = 0
    max_replicas: int | None = None

    def batch_s(self, num_images: int) -> float:
        """Return the seconds of a batch, linear between those of the options."""
        points = sorted((one.batch, one.seconds) for one in self.options)
        for (b0, s0), (b1, s1) in pairwise(points):
            if num_images <= b1:
                return s0 + (s1 - s0) * max(0, num_images - b0) / (b1 - b0)
        return points[-1][1]


@dataclass(frozen=True, slots=True)
class CascadeSpec:
    """A light model before a heavy one.

    Attributes:
        discriminate_s: from the light model's image to its confidence.
        quality: over the deferral rate.
        deferral: offline curve of the confidences.
        num_scorers: replicas that score one image at a time; None where a light replica scores what
            it has made, as the last part of its batch.
    """

    heavy_model: str
    quality: QualityCurve
    deferral: DeferralCurve
    discriminate_s: float = 0.0
    num_scorers: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Requests with one deadline: for a model, or a cascade that begins with it."""

    name: str
    model: str
    slo_s: float
    cascade: CascadeSpec | None = None
    weight: int = 1


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A type of GPU, and what one costs for a unit of time."""

    device: str
    price: int = 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that a planner knows beforehand."""

    devices: tuple[DeviceSpec, ...]
    pools: tuple[PoolSpec, ...]
    services: tuple[ServiceSpec, ...]

    def pools_of(self, model: str) -> tuple[PoolSpec, ...]:
        return tuple(pool for pool in self.pools if pool.model == model)
