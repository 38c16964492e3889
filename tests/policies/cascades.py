"""Figures of a published cascade (DiffServe, cascade 1), for tests."""

import random

from ray_cluster.policies.allocation_problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
    Supply,
)
from ray_cluster.policies.cascade_curves import DeferralCurve, QualityCurve

FIDS_BY_LIGHT_TENTHS = (
    *(18.55, 17.85, 17.33, 16.98, 16.79, 16.95),
    *(17.26, 17.95, 18.86, 20.17, 22.77),
)
FID = QualityCurve(tuple(n / 10 for n in range(11)), FIDS_BY_LIGHT_TENTHS[::-1])
# the published points of the curve, with those at which optima are published
DEFERRALS = DeferralCurve(
    (0.0, 0.05, 0.1, 0.15, 0.2, 0.215, 0.26, 0.3, 0.485, 0.5, 1.0),
    (0.0, 0.36, 0.449, 0.514, 0.582, 0.602, 0.722, 0.788, 0.964, 0.993, 1.0),
)

SD_TURBO = tuple(
    BatchOption(batch, seconds)
    for batch, seconds in ((1, 0.1), (2, 0.15), (4, 0.22), (8, 0.41), (16, 0.77), (32, 1.56))
)
SD15 = tuple(
    BatchOption(batch, seconds)
    for batch, seconds in ((1, 1.78), (2, 2.16), (4, 3.68), (8, 6.79), (16, 12.88), (32, 25.35))
)
# of which more deferral is always better: what is maximised when a threshold is
MORE_IS_BETTER = QualityCurve((0.0, 1.0), (0.0, 1.0), lower_is_better=False)


def cascade_problem(
    demand_per_s: float,
    *,
    quality: QualityCurve = FID,
    num_gpus: int = 16,
    num_light: int = 0,
    num_heavy: int = 0,
    lost_share: float = 0.0,
    num_waiting: tuple[int, int] = (0, 0),
    slo_s: float = 5.0,
) -> AllocationProblem:
    """The published cascade on equal GPUs that cost nothing."""
    light = Pool("light", "sd-turbo", "A100", SD_TURBO, 1, num_light, 0, lost_share)
    heavy = Pool("heavy", "sd-1.5", "A100", SD15, 1, num_heavy, 0, lost_share)
    service = Service(
        "images",
        slo_s,
        demand_per_s,
        Stage("sd-turbo", num_waiting[0]),
        heavy=Stage("sd-1.5", num_waiting[1]),
        quality=quality,
        overhead_s=0.01,
    )
    return AllocationProblem((Supply("A100", num_gpus, 0),), (light, heavy), (service,))


def large_problem(seed: int, load: float | None = None) -> AllocationProblem:
    """1,024 GPUs of three types with 20 pools: five cascades and five models alone.

    Args:
        seed: of everything.
        load: from 1, little, to 3.5, where half of the problems can't be met; drawn if None.
    """
    rng = random.Random(seed)
    load = rng.uniform(0.5, 3.5) if load is None else load
    devices = (("A100", 512, 3), ("H100", 256, 7), ("L40S", 256, 2))
    names = [name for name, _, _ in devices]
    pools, services = [], []

    def add_pools(model: str, first_s: float, number: int) -> None:
        for device in rng.sample(names, number):
            slowness = {"A100": 1.0, "H100": 0.6, "L40S": 1.6}[device] * rng.uniform(0.9, 1.1)
            batches = [(b, first_s * slowness * (0.35 + 0.65 * b)) for b in (1, 2, 4, 8, 16)]
            options = tuple(BatchOption(batch, seconds) for batch, seconds in batches)
            num = rng.randrange(40)
            young = rng.randrange(num + 1) if rng.random() < 0.2 else 0
            pools.append(Pool(f"{model}-{device}", model, device, options, 1, num, young, 0.3))

    for number in range(5):
        light, heavy, alone = (f"{kind}-{number}" for kind in ("light", "heavy", "alone"))
        add_pools(light, rng.uniform(0.05, 0.2), 1)
        add_pools(heavy, rng.uniform(0.8, 2.0), 2)
        add_pools(alone, rng.uniform(0.8, 1.6), 1)
        for model, other in ((light, heavy), (alone, None)):
            demand = load * rng.uniform(5, 60)
            queue = rng.choice([0, 0, rng.randrange(100)])
            services.append(
                Service(
                    model,
                    slo_s=rng.uniform(6, 12),
                    demand_per_s=demand,
                    first=Stage(model, queue),
                    surge_per_s=demand * rng.uniform(1.05, 1.5),
                    heavy=Stage(other, queue // 2) if other else None,
                    quality=FID if other else None,
                    overhead_s=0.01,
                )
            )
    supplies = tuple(Supply(*one) for one in devices)
    return AllocationProblem(supplies, tuple(pools), tuple(services), gain_per_start=1)
