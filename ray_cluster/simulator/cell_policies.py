"""The policies that replicas of one device each are compared under, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_cluster.policies.baselines.image_batches import (
    FixedBatches,
    mix_as_they_come,
    take_turns_by_size,
)
from ray_cluster.policies.baselines.slack_batching import SlackBatches, train_regression
from ray_cluster.policies.mixed_batching import mixed_batches
from ray_cluster.policies.step_policy import StepPolicy, one_size_batches
from ray_cluster.policies.types import RequestView, StepCost, WhenLate

# of a baseline whose replicas keep queues of their own
_OWN_QUEUE = 10_000
_PATCH_PX = 256
_REGRESSION_SEED = 0
KNOWN = (
    *("deadline", "deadline/open", "deadline/one-size", "fcfs", "static/CAP", "static/CAP/WAIT_S"),
    *("turns", "mixed-fcfs", "slack", "slack/THRESHOLD"),
)


@dataclass(frozen=True, slots=True)
class CellPolicy:
    """How a cell is run.

    Attributes:
        steps: what a replica does between two steps.
        promises_deadlines: whether the dispatcher is told of deadlines.
        when_late: whether requests are wanted though they will be late.
        max_in_flight: requests that a replica holds; None for as many as it steps.
    """

    steps: StepPolicy
    promises_deadlines: bool = False
    when_late: WhenLate = "accept"
    max_in_flight: int | None = None


def cell_policy(
    name: str, *, cost: StepCost, examples: Sequence[RequestView], max_batch: int
) -> CellPolicy:
    """Return a policy by its name.

    Args:
        name: ``deadline`` (ours), ``deadline/open`` (the same without refusals),
            ``deadline/one-size`` (the same where batches hold one size), ``fcfs``, ``static/4`` and
            ``static/4/2.5`` (fixed batches of so many, which wait for so many seconds), ``turns``,
            ``mixed-fcfs``, ``slack`` and ``slack/0.3`` (with a threshold).
        cost: of a step, for predictors to learn from.
        examples: a request of each size.
        max_batch: most rows that a replica steps together.

    Raises:
        ValueError: there is no such policy.
    """
    try:
        return _policy(name.split("/"), cost, examples, max_batch)
    except ValueError:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(KNOWN)}") from None


def _policy(
    words: Sequence[str], cost: StepCost, examples: Sequence[RequestView], max_batch: int
) -> CellPolicy:
    match words:
        case ["deadline"]:
            return CellPolicy(mixed_batches, promises_deadlines=True, when_late="refuse")
        case ["deadline", "open"]:
            return CellPolicy(mixed_batches, promises_deadlines=True)
        case ["deadline", "one-size"]:
            return CellPolicy(one_size_batches, promises_deadlines=True, when_late="refuse")
        case ["fcfs"]:
            return CellPolicy(FixedBatches(1), max_in_flight=1)
        case ["static", cap, *wait] if len(wait) <= 1:
            batches = FixedBatches(int(cap), *map(float, wait))
            return CellPolicy(batches, max_in_flight=_OWN_QUEUE if wait else int(cap))
        case ["turns"]:
            return CellPolicy(take_turns_by_size)
        case ["mixed-fcfs"]:
            return CellPolicy(mix_as_they_come)
        case ["slack", *threshold] if len(threshold) <= 1:
            rng = np.random.default_rng(_REGRESSION_SEED)
            regression = train_regression(
                cost, examples, rng, max_batch=max_batch, patch_px=_PATCH_PX
            )
            slack = SlackBatches(regression, *map(float, threshold))
            return CellPolicy(slack, max_in_flight=_OWN_QUEUE)
    raise ValueError
