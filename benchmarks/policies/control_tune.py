"""Chooses the settings of every policy that plans a cluster on the tuning seeds, and writes them.

``python -m benchmarks.policies.control_tune`` searches with the experiments as ``cascade.yaml`` and
``autoscaling.yaml`` have them, all policies alike; ``--only`` some of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatch
from multiprocessing import Pool
from pathlib import Path

from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.simulator import autoscaling_policies, cascade_policies
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment
from ray_cluster.simulator.cascade_experiment import CascadeExperiment
from ray_cluster.simulator.choice_files import load_choices, save_choices
from ray_cluster.simulator.control_choices import COMMAND, TunedSettings, choice_of
from ray_cluster.simulator.control_experiment import policy_named
from ray_cluster.simulator.task_files import validated

FOLDER = Path(__file__).parent
CHOICES = FOLDER / "control_choices.json"


def names() -> list[tuple[str, str]]:
    """All searches: a kind and a policy."""
    return [
        *(("cascade", one.name) for one in cascade_policies.POLICIES),
        *(("autoscaling", one.name) for one in autoscaling_policies.POLICIES),
    ]


def search(task: tuple[str, str]) -> TunedSettings:
    kind, name = task
    path = FOLDER / f"{kind}.yaml"
    content = read_mapping(path, "experiment")
    if kind == "cascade":
        cascade = validated(CascadeExperiment, content, path, "experiment")
        first = policy_named(cascade_policies.POLICIES, name)
        return choice_of(kind, first, cascade_policies.search(cascade, first), "search")
    day = validated(AutoscalingExperiment, content, path, "experiment")
    second = policy_named(autoscaling_policies.POLICIES, name)
    return choice_of(kind, second, autoscaling_policies.search(day, second), "search")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=CHOICES)
    parser.add_argument(
        "--only", default="*", help="a pattern like 'cascade/*'; OUT keeps what it has of others"
    )
    options = parser.parse_args()
    tasks = [task for task in names() if fnmatch("/".join(task), options.only)]
    if not tasks or options.processes < 1:
        parser.error("--only names no search" if not tasks else "--processes must be at least 1")
    # what can't be read is said before the search
    kept = load_choices(options.out, TunedSettings, command=COMMAND) if options.out.exists() else []
    with Pool(options.processes) as pool:
        found = pool.map(search, tasks, chunksize=1)
    save_choices(options.out, merged(kept, found))


def merged(kept: Sequence[TunedSettings], found: Sequence[TunedSettings]) -> list[TunedSettings]:
    """Return all choices in the order of :func:`names`, new ones instead of old ones."""
    choices = {(one.kind, one.policy): one for one in (*kept, *found)}
    return [choices[name] for name in names() if name in choices]


if __name__ == "__main__":
    main()
