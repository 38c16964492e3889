"""Algorithm 1 as published, and the regression that predicts its steps."""

from collections.abc import Sequence

import numpy as np
import pytest

from ray_cluster.policies.baselines.slack_batching import SlackBatches, train_regression
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
from ray_cluster.policies.types import RequestView, RowView, StepCost
from tests.fakes import request_view

COST = StepCost(0.5, 1.0)


def predict(requests: Sequence[RequestView]) -> float:
    return step_s(COST, work_of(requests))


def decide(*requests: RequestView, threshold: float = 0.0, cap: int = 4) -> StepDecision:
    view = StepView([RowView(one) for one in requests], COST, cap, 0.0)
    return SlackBatches(predict, threshold)(view)


def test_the_least_slack_joins_first_and_who_would_be_late_even_so_is_dropped() -> None:
    waits = [request_view("calm", deadline_s=90.0), request_view("urgent", deadline_s=50.0)]
    assert decide(*waits, cap=1).request_ids == ("urgent",)
    assert decide(*waits).request_ids == ("urgent", "calm")
    hopeless = request_view("hopeless", deadline_s=14.0)
    assert decide(hopeless, *waits) == StepDecision(("urgent", "calm"), 10, ("hopeless",))


def test_nobody_joins_who_would_make_the_most_urgent_late() -> None:
    # 10 steps of 1.5 s alone, of 2.5 s together
    active = request_view("active", steps_done=1, deadline_s=20.0)
    assert decide(active, request_view("new", deadline_s=90.0)) == StepDecision(("active",))
    active = request_view("active", steps_done=1, deadline_s=23.0)
    assert decide(active, request_view("new", deadline_s=90.0)).request_ids == ("active", "new")


def test_the_benefit_of_equation_1_must_exceed_the_threshold() -> None:
    # 1 / 1.5 each a second alone and 2 / 2.5 together: 0.444 / (0.8 x 1.333)
    rows = [request_view("a", steps_done=1), request_view("b")]
    assert decide(*rows, threshold=0.41).request_ids == ("a", "b")
    assert decide(*rows, threshold=0.42).request_ids == ("a",)


def test_the_regression_predicts_steps_that_it_was_not_trained_on() -> None:
    examples = [request_view("x", width_px=side, height_px=side) for side in (512, 768, 1024)]
    cost = StepCost(0.04, 0.017)
    rng = np.random.default_rng(1)
    regression = train_regression(cost, examples, rng, max_batch=12, patch_px=256)
    assert regression.mse_ms2 < 5
    for batch in ([0], [0, 1, 2], [2] * 3 + [1] * 4, [0] * 6 + [1] * 3):
        requests = [examples[place] for place in batch]
        wanted = step_s(cost, work_of(requests))
        assert regression(requests) == pytest.approx(wanted, rel=0.1)
