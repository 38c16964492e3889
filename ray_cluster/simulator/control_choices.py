"""Settings of policies that plan a cluster: files of them, and who chose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray_cluster.simulator.choice_files import load_choices
from ray_cluster.simulator.control_experiment import (
    ControlExperiment,
    ControlPolicy,
    ControlRun,
    E,
    Settings,
    policy_named,
)

COMMAND = "python -m benchmarks.policies.control_tune"


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """Settings of a policy.

    Attributes:
        kind: of the experiments that they are for.
        settings: by name.
        chosen_by: a search on tuning seeds, or nobody: then they are the first candidates.
    """

    kind: str
    policy: str
    settings: Mapping[str, float]
    chosen_by: Literal["search", "default"]


def choice_of(
    kind: str,
    policy: ControlPolicy[E],
    settings: Settings,
    chosen_by: Literal["search", "default"],
) -> TunedSettings:
    """Return settings with their names."""
    named = dict(zip(policy.knobs, settings, strict=True))
    return TunedSettings(kind, policy.name, named, chosen_by)


def checked_choices(
    experiment: E, policies: Sequence[ControlPolicy[E]], folder: Path
) -> list[TunedSettings]:
    """Return the settings of an experiment's policies, if all of them can be run.

    Without a file of choices each policy has the first of its candidates.

    Args:
        experiment: whose policies.
        policies: that there are.
        folder: of the experiment's file.

    Raises:
        ConfigError: a profile or the file of choices can't be read.
        ValueError: there is no such policy, nothing was chosen for it, or it can't plan this.
    """
    wanted = [policy_named(policies, name) for name in experiment.policies]
    if experiment.choices is None:
        found = [choice_of(experiment.kind, one, one.candidates[0], "default") for one in wanted]
    else:
        read = load_choices(folder / experiment.choices, TunedSettings, command=COMMAND)
        found = [_chosen(experiment, one, read) for one in wanted]
    fleet = experiment.fleet()
    for policy, choice in zip(wanted, found, strict=True):
        try:
            policy.build(fleet, experiment, tuple(choice.settings.values()))
        except ValueError as error:
            raise ValueError(f"policies: given {policy.name!r}: {error}") from None
    return found


def _chosen(
    experiment: E, policy: ControlPolicy[E], read: Sequence[TunedSettings]
) -> TunedSettings:
    """A policy's settings in the order of its knobs."""
    for one in read:
        if (one.kind, one.policy) == (experiment.kind, policy.name):
            return choice_of(one.kind, policy, _settings(policy, one), one.chosen_by)
    raise ValueError(
        f"policies: given {policy.name!r}, for which {experiment.choices} has no settings; "
        f"{COMMAND} writes them"
    )


def _settings(policy: ControlPolicy[E], choice: TunedSettings) -> Settings:
    """Settings that a search could choose; ValueError for others."""
    for candidate in policy.candidates:
        if dict(zip(policy.knobs, candidate, strict=True)) == choice.settings:
            return candidate
    raise ValueError(
        f"choices: given {dict(choice.settings)} for {policy.name!r}; allowed: what {COMMAND} "
        "chooses among"
    )


def runs_of(experiment: ControlExperiment, choices: Sequence[TunedSettings]) -> list[ControlRun]:
    """Return every simulation of an experiment; those of one seed have equal requests."""
    return [
        ControlRun(one.policy, tuple(one.settings.values()), seed)
        for seed in experiment.seeds
        for one in choices
    ]
