"""Chooses the settings of control loops and the baselines of groups, on seeds 0 to 9.

``python -m benchmarks.policies.tune`` writes ``control_choices.json`` and ``sp_choices.json``: the
first takes hours, the second some four minutes on two cores. ``--only`` searches some of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import numpy as np

from ray_cluster.policies.baselines.sp_knapsack import Clocking
from ray_cluster.policies.baselines.sp_static import Discipline
from ray_cluster.policies.sequence_parallel.types import ROUNDING_S, DegreeMenu
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.control.experiment import ControlExperiment, TunedSettings, run_policy
from ray_cluster.simulator.experiment import load_choices
from ray_cluster.simulator.experiments import read_experiment
from ray_cluster.simulator.groups.experiment import (
    COMMAND,
    SpCondition,
    SpExperiment,
    SpUnit,
    TunedPolicy,
    run_unit,
)

_T = TypeVar("_T")

FOLDER = Path(__file__).parent
SEEDS = range(10)
MOST_VIOLATIONS, LEAST_ATTAINMENT = 0.02, 0.995
_FACTORS = (1.05, 1.15, 1.25, 1.4)
# settings to search among, all combinations; the last changes first, and the first of equals wins
_Axes = Mapping[str, Sequence[float]]
GRIDS: Mapping[str, _Axes] = {
    "cascade/allocation": {"demand_quantile": (0.6, 0.75), "utilisation": (0.95, 0.9, 1.0)},
    "cascade/all-light": {"max_batch": (4.0, 8.0, 16.0, 32.0)},
    "cascade/all-heavy": {"max_batch": (1.0, 2.0, 4.0)},
    "cascade/proteus": {"smoothing": (0.5, 0.2, 0.8), "demand_factor": _FACTORS},
    "cascade/static": {"peak_factor": (1.05, 1.0, 1.1, 1.15, 1.25, 1.4)},
    "cascade/static-threshold": {
        "smoothing": (0.5, 0.8),
        "demand_factor": _FACTORS,
        "threshold": (0.05, 0.08, 0.1, 0.15, 0.2),
    },
    "cascade/diffserve": {"smoothing": (0.5, 0.2, 0.8), "demand_factor": _FACTORS},
    "cascade/aimd": {"smoothing": (0.2, 0.5, 0.8), "demand_factor": _FACTORS},
    "cascade/queue-2": {"smoothing": (0.5,), "demand_factor": (1.05,)},
    "cascade/queue-1": {"smoothing": (0.5, 0.8), "demand_factor": _FACTORS},
    "autoscaling/allocation": {"utilisation": (0.9, 0.75, 1.0), "surge_quantile": (0.95, 0.8)},
    "autoscaling/ongoing-requests": {
        "target_ongoing_requests": (2.0, 1.5, 3.0, 4.0),
        "upscale_delay_s": (30.0, 0.0),
        "downscale_delay_s": (600.0, 300.0, 60.0),
    },
    # not searched: its first candidate
    "autoscaling/clairvoyant": {"utilisation": (0.9,), "surge_quantile": (0.95,)},
}
# how many candidates of a family go on to how many seeds
_STAGES = ((None, 1), (32, 3), (8, 10))
# rounds are slow to simulate: nine variants on fewer seeds, at the rates that are reported for them
_KNAPSACK_SEEDS, _KNAPSACK_RATES = 4, (12.0, 18.0)
# of groups, by profile: the cells that are searched
_GROUPS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "flux-h100-a": {"rates_per_min": (6, 9, 12, 15, 18), "scales": (1.0, 1.1, 1.2, 1.3, 1.5)},
    "flux-h100-b": {"rates_per_min": (6, 12, 18), "scales": (1.0, 1.3, 1.5)},
}


def candidates_of(axes: _Axes) -> list[dict[str, float]]:
    """Return all combinations of settings."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def search_settings(name: str) -> TunedSettings:
    """Return the best settings of a policy of a control loop, given as ``KIND/POLICY``."""
    kind, policy = name.split("/")
    experiment = cast(ControlExperiment, read_experiment(FOLDER / f"{kind}.yaml"))
    candidates = candidates_of(GRIDS[name])
    if len(candidates) == 1:
        return TunedSettings(kind, policy, candidates[0], "default")
    best = min(candidates, key=partial(rank, experiment, policy, SEEDS))
    return TunedSettings(kind, policy, best, "search")


def rank(
    experiment: ControlExperiment, policy: str, seeds: Sequence[int], settings: dict[str, float]
) -> tuple[bool, float]:
    """Rank settings, the best lowest.

    Of a cascade, the best quality with few enough violations; of a day, the fewest GPU-hours with
    enough requests in time. Where no settings keep that, the ones that come nearest.
    """
    rows = [run_policy(experiment, policy, settings, seed) for seed in seeds]

    def mean(figure: str) -> float:
        return float(np.mean([row.figures[figure] for row in rows]))

    if isinstance(experiment, CascadeExperiment):
        violations, files = mean("violations"), experiment.files
        is_late = violations > MOST_VIOLATIONS
        sign = 1 if files.curves.quality.lower_is_better else -1
        return is_late, violations if is_late else sign * mean(files.quality.key)
    attainment = mean("attainment")
    is_low = attainment < LEAST_ATTAINMENT
    return is_low, -attainment if is_low else mean("gpu_hours")


def group_experiment(profile: str) -> SpExperiment:
    """Return the cells of a profile, on the tuning seeds."""
    content: dict[str, Any] = {"name": "tuning", "what": "Tuning.", "policies": ["widest"]}
    content |= {"kind": "sequence-parallel", "profile": profile, "first_seed": 0}
    return SpExperiment.model_validate({**content, "num_seeds": len(SEEDS), **_GROUPS[profile]})


def search_policy(profile: str, cell: SpCondition, family: str) -> TunedPolicy:
    """Return the best of a family in a cell: all on one seed, the better ones on more."""
    experiment = group_experiment(profile)
    num_seeds = _KNAPSACK_SEEDS if family == "best_knapsack" else len(SEEDS)
    return choose(experiment, cell, family, experiment.seeds[:num_seeds])


def choose(
    experiment: SpExperiment, cell: SpCondition, family: str, seeds: Sequence[int]
) -> TunedPolicy:
    """Return the best of a family in a cell, on some seeds."""
    names = tried = family_names(experiment, cell, family)
    means: dict[str, float] = {}
    for most, num in _STAGES:
        if most is not None:
            names = sorted(names, key=lambda name: -means[name])[:most]
        policies = {name: name for name in names}
        units = [SpUnit(experiment, cell, seed, policies) for seed in seeds[:num]]
        rows = [row for unit in units for row in run_unit(unit)]
        means = {
            name: float(np.mean([one.figures["attainment"] for one in rows if one.policy == name]))
            for name in names
        }
    best = max(names, key=lambda name: means[name])
    points = round(100 * means[best], 3)
    return TunedPolicy(experiment.profile, family, cell, best, points, len(tried))


def family_names(experiment: SpExperiment, cell: SpCondition, family: str) -> list[str]:
    """Return the policies of a family that a cell may choose from."""
    menus = experiment.menus()
    if family == "best_knapsack":
        return [f"knapsack/{steps}/{one}" for steps in (1, 2, 5) for one in get_args(Clocking)]
    if family == "best_fixed":
        degrees = sorted({degree for menu in menus.values() for degree in menu.degrees})
        return [f"fixed/{degree}" for degree in degrees]
    step_budget_s = {
        task.menu.slo_class: (task.deadline_s - task.arrival_s - task.menu.tail_s) / task.num_steps
        for task in experiment.tasks(cell, experiment.first_seed)
    }
    columns = [_worth_trying(menu, step_budget_s[name]) for name, menu in menus.items()]
    return [
        f"static/{'-'.join(map(str, degrees))}/{order}"
        for degrees in product(*columns)
        for order in get_args(Discipline)
    ]


def _worth_trying(menu: DegreeMenu, budget_s: float) -> tuple[int, ...]:
    """The degrees that meet a deadline alone, and the next smaller one, which never does."""
    most_s = budget_s + ROUNDING_S
    in_time = [level for level, seconds in enumerate(menu.step_s) if seconds <= most_s]
    first = max(0, min(in_time, default=len(menu.degrees)) - 1)
    return menu.degrees[first:]


def group_searches() -> Iterator[tuple[str, Callable[[], TunedPolicy]]]:
    """All searches of groups, with a name that ``--only`` can match."""
    for profile in _GROUPS:
        for cell in group_experiment(profile).cells:
            for family in ("best_static", "best_fixed", "best_knapsack"):
                if family != "best_knapsack" or cell.rate_per_min in _KNAPSACK_RATES:
                    search = partial(search_policy, profile, cell, family)
                    yield f"sp/{profile}/{family}", search


def _call(search: Callable[[], Any]) -> Any:
    return search()


def save_choices(path: Path, choices: Sequence[Any]) -> None:
    """Write choices to a file, a line each."""
    lines = ",\n".join(json.dumps(asdict(one)) for one in choices)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _old(path: Path, choice: type[_T]) -> list[_T]:
    return load_choices(path, choice, command=COMMAND) if path.exists() else []


def merged(old: Sequence[TunedSettings], new: Sequence[TunedSettings]) -> list[TunedSettings]:
    """Return all choices in the order of the grids, new ones instead of old ones."""
    choices = {f"{one.kind}/{one.policy}": one for one in (*old, *new)}
    return [choices[name] for name in GRIDS if name in choices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the two files")
    parser.add_argument(
        "--only", default="*", help="a pattern like 'cascade/*' or 'sp/*'; others are kept"
    )
    options = parser.parse_args()
    names = [name for name in GRIDS if fnmatch(name, options.only)]
    groups = [search for name, search in group_searches() if fnmatch(name, options.only)]
    if not (names or groups) or options.processes < 1:
        parser.error("--only matches no search, or --processes is below 1")
    control_file, group_file = (
        options.out / name for name in ("control_choices.json", "sp_choices.json")
    )
    # what can't be read is reported before the search
    old, old_groups = _old(control_file, TunedSettings), _old(group_file, TunedPolicy)
    with Pool(options.processes) as pool:
        if names:
            save_choices(control_file, merged(old, pool.map(search_settings, names, chunksize=1)))
        if groups:
            found = pool.map(_call, groups, chunksize=2)
            places = {(one.profile, one.cell, one.family): one for one in (*old_groups, *found)}
            save_choices(group_file, list(places.values()))


if __name__ == "__main__":
    main()
