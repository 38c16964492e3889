"""Figures of a published cascade (DiffServe, cascade 1), for tests."""

from ray_cluster.policies.allocation.problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
    Supply,
)
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve

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
