"""Batches of mixed sizes by slack (PatchedServe, section 6, Algorithm 1 and equation 1).

As published but for the elapsed time, which its slack subtracts from an absolute deadline: with
deadlines as instants, the present instant is what must be subtracted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
from ray_cluster.policies.types import RequestView, StepCost

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

SizePx = tuple[int, int]
# what the paper trains its predictor on, and the share of it that is held out
NUM_COMBINATIONS = 300
HELD_OUT = 0.2


class StepPredictor(Protocol):
    """Predicts the seconds of a step of several requests."""

    def __call__(self, requests: Sequence[RequestView]) -> float:
        """Return the seconds."""


@dataclass(frozen=True)
class SizeRegression:
    """Support vector regression on how many requests of which sizes a batch holds.

    Features: the requests of each size, the number of sizes, the number of patches.

    Attributes:
        mse_ms2: mean squared error on what was held out, in square milliseconds.
    """

    sizes: tuple[SizePx, ...]
    patch_px: int
    model: Pipeline
    mse_ms2: float
    # equal batches are asked for again and again
    _known_s: dict[tuple[float, ...], float] = field(default_factory=dict, repr=False)

    def __call__(self, requests: Sequence[RequestView]) -> float:
        features = _features(requests, self.sizes, self.patch_px)
        if features not in self._known_s:
            self._known_s[features] = float(self.model.predict([features])[0]) / 1e3
        return self._known_s[features]


def train_regression(
    cost: StepCost,
    examples: Sequence[RequestView],
    rng: np.random.Generator,
    *,
    max_batch: int,
    patch_px: int,
) -> SizeRegression:
    """Train a regression on random batches of requests like the examples, one per size.

    Args:
        cost: says how long a step of each batch takes.
        examples: a request of each size.
        rng: draws the batches.
        max_batch: most requests in a batch.
        patch_px: side of a patch.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed (the extra ``baselines``).
    """
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    sizes = tuple(one.size_px for one in examples)
    batches = [
        [examples[place] for place in rng.integers(len(examples), size=count)]
        for count in rng.integers(1, max_batch + 1, size=NUM_COMBINATIONS)
    ]
    inputs = np.array([_features(batch, sizes, patch_px) for batch in batches])
    targets_ms = np.array([1e3 * step_s(cost, work_of(batch)) for batch in batches])
    first_held = int(NUM_COMBINATIONS * (1 - HELD_OUT))
    model = make_pipeline(StandardScaler(), SVR(C=1000.0, epsilon=0.1))
    model.fit(inputs[:first_held], targets_ms[:first_held])
    errors = model.predict(inputs[first_held:]) - targets_ms[first_held:]
    return SizeRegression(sizes, patch_px, model, float((errors**2).mean()))


def _features(
    requests: Sequence[RequestView], sizes: Sequence[SizePx], patch_px: int
) -> tuple[float, ...]:
    counts = Counter(one.size_px for one in requests)
    patches = sum(
        -(-width // patch_px) * -(-height // patch_px) * num
        for (width, height), num in counts.items()
    )
    return (*(float(counts[size]) for size in sizes), float(len(counts)), float(patches))


@dataclass(frozen=True)
class SlackBatches:
    """Takes waiting requests into the running batch, the one with the least slack first.

    Attributes:
        predict: seconds of a step.
        threshold: a candidate's benefit must be larger.
    """

    predict: StepPredictor
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"a threshold must be finite; given {self.threshold}")

    def __call__(self, view: StepView) -> StepDecision:
        """Decide; a :data:`ray_cluster.policies.steps.step_policy.StepPolicy`."""
        active = [row.request for row in view.rows if row.request.steps_done]
        waits = [row.request for row in view.rows if not row.request.steps_done]
        waits.sort(key=lambda one: self._slack(one, view.now_s))
        dropped: list[str] = []
        for candidate in waits:
            if len(active) == view.max_batch:
                break
            longer_s = self.predict([*active, candidate])
            if _is_late(candidate, longer_s, view.now_s):
                dropped.append(candidate.request_id)
                continue
            if active and self._hurts(active, candidate, longer_s, view.now_s):
                break
            active.append(candidate)
        everybody = len(active) + len(dropped) == len(view.rows)
        num_rounds = min((one.remaining_steps for one in active), default=1) if everybody else 1
        ids = tuple(one.request_id for one in active)
        return StepDecision(ids, num_rounds, tuple(dropped))

    def _hurts(
        self, active: Sequence[RequestView], candidate: RequestView, longer_s: float, now_s: float
    ) -> bool:
        """Whether the most urgent active request would be late, or too little is gained."""
        urgent = min(active, key=lambda one: self._slack(one, now_s))
        if _is_late(urgent, longer_s, now_s):
            return True
        current = len(active) / self.predict(active)
        alone = 1 / self.predict([candidate])
        together = (len(active) + 1) / longer_s
        return current * alone / (together * (current + alone)) <= self.threshold

    def _slack(self, request: RequestView, now_s: float) -> float:
        """What is left of the time to the deadline, in units of the request's own duration."""
        each_s = self.predict([request])
        left_s = request.deadline_s - now_s - request.remaining_steps * each_s
        return left_s / (request.num_steps * each_s)


def _is_late(request: RequestView, each_s: float, now_s: float) -> bool:
    return now_s + request.remaining_steps * each_s > request.deadline_s
