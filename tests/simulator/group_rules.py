"""What every simulated schedule of a group keeps, whoever planned it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from ray_cluster.simulator.groups.experiment import SpExperiment
from ray_cluster.simulator.groups.group import GroupOutcome, GroupTask, Stretch

WITHIN_S = 1e-6


def sp_experiment(**changes: Any) -> SpExperiment:
    """An experiment on a group, as a file has it."""
    content = {
        "kind": "sequence-parallel",
        "name": "small",
        "what": "Eight GPUs.",
        "profile": "flux-h100-a",
        "mixes": ["uniform"],
        "rates_per_min": [12],
        "scales": [1.3],
        "policies": ["rounds/most", "widest"],
        "first_seed": 0,
        "num_seeds": 2,
    }
    return SpExperiment.model_validate({**content, **changes})


def check_schedule(
    tasks: Sequence[GroupTask],
    outcomes: Sequence[GroupOutcome],
    stretches: Sequence[Stretch],
    *,
    num_gpus: int,
    switch_s: float,
) -> None:
    """Assert all rules of a run that has come to its end."""
    assert sorted(one.task.request_id for one in outcomes) == sorted(
        one.request_id for one in tasks
    )
    _check_gpus(stretches, num_gpus)
    for outcome in outcomes:
        own = [one for one in stretches if one.request_id == outcome.task.request_id]
        _check_request(outcome, own, switch_s)


def _check_gpus(stretches: Sequence[Stretch], num_gpus: int) -> None:
    for gpu in range(num_gpus):
        users = sorted((one.begin_s, one.end_s) for one in stretches if gpu in one.gpus)
        for (_, end_s), (begin_s, _) in pairwise(users):
            assert begin_s >= end_s - WITHIN_S, f"GPU {gpu} is used twice at {begin_s}"
    assert all(len(set(one.gpus)) == len(one.gpus) for one in stretches)
    assert all(0 <= gpu < num_gpus for one in stretches for gpu in one.gpus)


def _check_request(outcome: GroupOutcome, own: Sequence[Stretch], switch_s: float) -> None:
    task, step, end_s = outcome.task, 0, outcome.task.arrival_s
    for number, one in enumerate(own):
        assert one.begin_s >= end_s - WITHIN_S, "a step began before the one before it had ended"
        assert one.first_step == step
        assert one.num_steps > 0
        switch = switch_s if number else 0.0
        assert one.first_step_s == pytest.approx(one.begin_s + switch)
        level = task.menu.degrees.index(len(one.gpus))
        pace = task.pace[step + one.num_steps] - task.pace[step]
        assert one.end_s - one.first_step_s == pytest.approx(pace * task.true_step_s[level])
        step, end_s = step + one.num_steps, one.end_s
    assert outcome.gpu_s == pytest.approx(
        sum(len(one.gpus) * (one.end_s - one.begin_s) for one in own)
    )
    assert outcome.num_switches == max(0, len(own) - 1)
    if outcome.finish_s is not None:
        assert step == task.num_steps
        assert outcome.finish_s == pytest.approx(end_s + task.menu.tail_s)
