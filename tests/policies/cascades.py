"""Figures of a published cascade (DiffServe, cascade 1), for tests."""

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
