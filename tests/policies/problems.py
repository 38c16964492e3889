"""Random clusters to plan for, of any size."""

from __future__ import annotations

import random
from typing import NamedTuple

from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.policies.allocation.problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
    Supply,
)


class ClusterSize(NamedTuple):
    """GPUs, and what is allocated to them.

    Attributes:
        cascades: services of two models in three pools.
        alone: services of one model in one pool.
    """

    gpus: int
    cascades: int
    alone: int

    @property
    def pools(self) -> int:
        """How many there are."""
        return 3 * self.cascades + self.alone


LARGEST = ClusterSize(1024, 5, 5)
# type, its GPUs of the largest cluster, the price of one, and how slow it is
_DEVICES = (("A100", 512, 3, 1.0), ("H100", 256, 7, 0.6), ("L40S", 256, 2, 1.6))
_BATCHES = (1, 2, 4, 8, 16)
LOST_SHARE = 0.3
_CURVES = load_curves("diffserve-1")


def draw_problem(
    seed: int, load: float | None = None, size: ClusterSize = LARGEST
) -> AllocationProblem:
    """Return a cluster of up to three types of GPU; the largest has 1,024 of them in 20 pools.

    Args:
        seed: of everything.
        load: from 1, little, to 3.5, where half of the largest can't be met; drawn if None.
        size: of the cluster.
    """
    rng = random.Random(seed)
    load = rng.uniform(0.5, 3.5) if load is None else load
    # requests for each service of the largest cluster, spread over what there is
    share = size.gpus / LARGEST.gpus * LARGEST.pools / size.pools
    supplies = _supplies(size)
    pools: list[Pool] = []
    services: list[Service] = []
    for number in range(max(size.cascades, size.alone)):
        light, heavy, alone = (f"{kind}-{number}" for kind in ("light", "heavy", "alone"))
        models: list[tuple[str, str | None]] = []
        if number < size.cascades:
            pools += _pools(light, rng.uniform(0.05, 0.2), supplies, 1, share, rng)
            pools += _pools(heavy, rng.uniform(0.8, 2.0), supplies, 2, share, rng)
            models.append((light, heavy))
        if number < size.alone:
            pools += _pools(alone, rng.uniform(0.8, 1.6), supplies, 1, share, rng)
            models.append((alone, None))
        services += [_service(*one, load * share, rng) for one in models]
    return AllocationProblem(tuple(supplies), tuple(pools), tuple(services), gain_per_start=1)


def _supplies(size: ClusterSize) -> list[Supply]:
    """GPUs of each type, in the shares of the largest cluster; all of one type for a single one."""
    counts = [size.gpus * gpus // LARGEST.gpus for _, gpus, _, _ in _DEVICES]
    counts[0] += size.gpus - sum(counts)
    return [
        Supply(device, count, price)
        for (device, _, price, _), count in zip(_DEVICES, counts, strict=True)
        if count
    ]


def _pools(
    model: str,
    first_s: float,
    supplies: list[Supply],
    number: int,
    share: float,
    rng: random.Random,
) -> list[Pool]:
    """So many pools of a model, each on another type, if there are as many."""
    slowness_by_device = {device: slowness for device, _, _, slowness in _DEVICES}
    pools = []
    devices = [one.device for one in supplies]
    for device in rng.sample(devices, min(number, len(devices))):
        slowness = slowness_by_device[device] * rng.uniform(0.9, 1.1)
        options = [BatchOption(b, first_s * slowness * (0.35 + 0.65 * b)) for b in _BATCHES]
        num = int(rng.randrange(40) * share)
        young = rng.randrange(num + 1) if rng.random() < 0.2 else 0
        name = f"{model}-{device}"
        pools.append(Pool(name, model, device, tuple(options), 1, num, young, LOST_SHARE))
    return pools


def _service(model: str, heavy: str | None, load: float, rng: random.Random) -> Service:
    demand = load * rng.uniform(5, 60)
    queue = rng.choice([0, 0, rng.randrange(100)])
    return Service(
        model,
        slo_s=rng.uniform(6, 12),
        demand_per_s=demand,
        first=Stage(model, queue),
        surge_per_s=demand * rng.uniform(1.05, 1.5),
        heavy=Stage(heavy, queue // 2) if heavy else None,
        quality=_CURVES.quality if heavy else None,
        overhead_s=0.01,
    )
