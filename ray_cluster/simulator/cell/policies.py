"""The policies that replicas of one device each are compared under, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ray_cluster.policies.baselines.image_batches import (
    FixedBatches,
    mix_as_they_come,
    take_turns_by_size,
)
from ray_cluster.policies.baselines.one_size_batches import one_size_batches
from ray_cluster.policies.baselines.slack_batching import SlackBatches, train_regression
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepPolicy
from ray_cluster.policies.types import RequestView, StepCost, WhenLate

# of a baseline whose replicas keep queues of their own
_OWN_QUEUE = 10_000
_MOST_WAIT_S, _MOST_STEPS = 3600.0, 1000
_PATCH_PX = 256
_REGRESSION_SEED = 0
# plain numbers, not all that Python accepts as one
_NAME = re.compile(r"[a-z-]+(/[a-z0-9.-]+)*")
KNOWN = (
    *("deadline", "deadline/open", "deadline/one-size", "deadline/no-preemption", "fcfs"),
    *("static/CAP", "static/CAP/WAIT_S", "turns", "fewer/STEPS", "mixed-fcfs", "slack"),
    *("slack/THRESHOLD", "deadline/services/NUM", "deadline/open/services/NUM"),
)


@dataclass(frozen=True, slots=True)
class CellPolicy:
    """How a cell is run.

    Attributes:
        steps: what a replica does between two steps.
        promises_deadlines: whether the dispatcher gets the requests' deadlines.
        when_late: what the dispatcher does with requests that would be late.
        max_in_flight: requests that a replica holds; None for as many as it steps.
        most_steps: upper limit on the steps of every image; None for no limit.
        has_preemption: whether a running request may be preempted.
        num_services: how many of the devices run ControlNets alone.
    """

    steps: StepPolicy
    promises_deadlines: bool = False
    when_late: WhenLate = "accept"
    max_in_flight: int | None = None
    most_steps: int | None = None
    has_preemption: bool = False
    num_services: int = 0


def cell_policy(
    name: str, *, cost: StepCost, examples: Sequence[RequestView], max_batch: int
) -> CellPolicy:
    """Return a policy by its name; docs/simulator.md describes them.

    Args:
        name: one of `KNOWN`, with numbers for what stands there in capitals.
        cost: of a step, from which predictors are trained.
        examples: a request of each size.
        max_batch: most rows that a replica steps together.

    Raises:
        ValueError: there is no such policy.
    """
    try:
        if not _NAME.fullmatch(name):
            raise ValueError(name)
        return _PLAIN.get(name) or _parametrised(name.split("/"), cost, examples, max_batch)
    except (ValueError, KeyError):
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(KNOWN)}") from None


def _parametrised(
    words: Sequence[str], cost: StepCost, examples: Sequence[RequestView], max_batch: int
) -> CellPolicy:
    match words:
        case ["static", cap] if int(cap) <= _OWN_QUEUE:
            return CellPolicy(FixedBatches(int(cap)), max_in_flight=int(cap))
        case ["static", cap, wait_s] if int(cap) <= _OWN_QUEUE and float(wait_s) <= _MOST_WAIT_S:
            return CellPolicy(FixedBatches(int(cap), float(wait_s)), max_in_flight=_OWN_QUEUE)
        case ["fewer", steps] if 0 < int(steps) <= _MOST_STEPS:
            return CellPolicy(take_turns_by_size, most_steps=int(steps))
        case ["deadline", *more, "services", num] if 0 < int(num) < _OWN_QUEUE:
            return replace(_SERVED["/".join(["deadline", *more])], num_services=int(num))
        case ["slack", *threshold] if len(threshold) <= 1:
            rng = np.random.default_rng(_REGRESSION_SEED)
            regression = train_regression(
                cost, examples, rng, max_batch=max_batch, patch_px=_PATCH_PX
            )
            slack = SlackBatches(regression, *map(float, threshold))
            return CellPolicy(slack, max_in_flight=_OWN_QUEUE)
    raise ValueError


_DEADLINE = CellPolicy(
    mixed_batches, promises_deadlines=True, when_late="refuse", has_preemption=True
)
_PLAIN = {
    "deadline": _DEADLINE,
    "deadline/open": replace(_DEADLINE, when_late="accept"),
    "deadline/one-size": replace(_DEADLINE, steps=one_size_batches),
    "deadline/no-preemption": replace(_DEADLINE, has_preemption=False),
    "fcfs": CellPolicy(FixedBatches(1), max_in_flight=1),
    "turns": CellPolicy(take_turns_by_size),
    "mixed-fcfs": CellPolicy(mix_as_they_come),
}
# those that may have ControlNets on devices of their own
_SERVED = {name: _PLAIN[name] for name in ("deadline", "deadline/open")}
