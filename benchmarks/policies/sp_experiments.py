"""The experiments on one group of 8 GPUs that are reported, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ray_cluster.simulator.sp_experiment import BOUND, SpExperiment
from ray_cluster.simulator.sp_tuning import BEST_FIXED, BEST_KNAPSACK, BEST_STATIC

CHOICES = Path(__file__).with_name("sp_choices.json")
OURS, GUARDED, WIDEST = "rounds/most", "rounds/large", "widest"
PUBLISHED = "knapsack/5/grid"

_USUAL = (OURS, GUARDED, WIDEST, BEST_STATIC, BEST_FIXED, "moldable")
_A = SpExperiment(policies=(*_USUAL, PUBLISHED, BEST_KNAPSACK))
_SENSITIVE = replace(_A, rates_per_min=(12.0,), policies=(OURS, GUARDED, WIDEST, BEST_STATIC))
_B = replace(_A, profile="flux-h100-b", scales=(1.0, 1.3, 1.5))

EXPERIMENTS: Mapping[str, SpExperiment] = {
    "table A, 12/min": replace(_A, rates_per_min=(12.0,), policies=(*_A.policies, BOUND)),
    "table A, 18/min": replace(_A, rates_per_min=(18.0,)),
    "table A, other rates": replace(_A, rates_per_min=(6.0, 9.0, 15.0), policies=_USUAL),
    "table B": _B,
    "table B, 6/min": replace(_B, rates_per_min=(6.0,), policies=_USUAL),
    "switch 0 ms": replace(_SENSITIVE, switch_s=0.0),
    "switch 100 ms": replace(_SENSITIVE, switch_s=0.1),
    "step noise 2 %": replace(_SENSITIVE, step_noise=0.02),
    "times believed wrong by 5 %": replace(_SENSITIVE, time_error=0.05),
    "bursts, CV 1.5": replace(_SENSITIVE, cv=1.5),
}
