"""What ControlNets cost is measured at the start where they run here, and learnt from steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.engine.stages.warmup import measure_step_cost
from ray_cluster.policies.costs.cost_learning import remote_controlnet_share
from ray_cluster.policies.costs.cost_model import ExtraWork, StepWork, step_s
from ray_cluster.policies.types import StepCost
from tests.engine.conftest import Zoo
from tests.engine.controlled import Subject, engine_with
from tests.engine.test_lora_price import Computed

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def subjects(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(zoo, name, tmp_path_factory.mktemp(name)))


def measured(subject: Subject, controls: LocalControlNets | None) -> StepCost:
    with Computed() as clock:
        return measure_step_cost(
            subject.model, max_batch=3, clock=lambda: clock.now_s, controls=controls
        )


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_controlnets_of_this_process_are_measured(
    subjects: Callable[[str], Subject], name: str
) -> None:
    """They are the base's first half and some layers more."""
    banks = subjects(name).banks()
    cost = measured(subjects(name), LocalControlNets(banks))
    assert 0.2 < cost.control_share < 1.5
    assert not any(map(len, banks.values()))


def test_one_elsewhere_is_estimated_from_what_steps_cost(
    subjects: Callable[[str], Subject],
) -> None:
    # a first call prepares more
    measured(subjects("sd15"), None)
    cost, profile = measured(subjects("sd15"), None), subjects("sd15").model.profile
    size = (profile.default_width_px, profile.default_height_px)
    assert cost.control_share == remote_controlnet_share(cost, size, 3) > 0
    assert measured(subjects("sd15"), LocalControlNets({})) == cost


@torch.inference_mode()
def test_a_step_counts_the_controlnets_that_do_something_in_it(
    subjects: Callable[[str], Subject],
) -> None:
    """The fourth request's acts from 0.3 to 0.7 of its five steps: in the third alone."""
    subject = subjects("sd15")
    engine = engine_with(subject, LocalControlNets(subject.banks()))
    (state,) = subject.states([3])
    engine.add(state)
    found = []
    while len(engine):
        report = engine.step()
        assert not report.failed
        extra = report.work.extra
        found.append(0.0 if extra is None else extra.control_megapixels)
    assert [one > 0 for one in found] == [False, False, True, False, False]
    # with guidance each image is two rows
    assert found[2] == pytest.approx(2 * 64 * 64 / 1e6)


def test_steps_with_controlnets_do_not_make_rows_without_seem_dear() -> None:
    guess = StepCost(0.02, 1.0, control_share=0.05)
    real, rng = replace(guess, control_share=0.8), random.Random(1)
    costs, blind = StepCosts(guess), StepCosts(guess)
    for _ in range(300):
        count = rng.randint(1, 8)
        nets = sum(rng.randint(0, 2) for _ in range(count))
        extra = ExtraWork(control_megapixels=0.01 * nets)
        work = StepWork(0.01 * count, 0.0, extra=extra)
        seconds = step_s(real, work) * rng.gauss(1, 0.05)
        costs.observe(work, seconds)
        blind.observe(replace(work, extra=None), seconds)
    assert costs.current.control_share == pytest.approx(0.8, abs=0.1)
    for count in (1, 4, 8):
        alone = StepWork(0.01 * count, 0.0)
        assert step_s(costs.current, alone) == pytest.approx(step_s(real, alone), rel=0.1)
        # one that leaves ControlNets out of the work takes all rows for dearer than they are
        assert step_s(blind.current, alone) > 1.2 * step_s(real, alone)


def test_a_cost_without_pixels_is_learnt_from_too() -> None:
    costs = StepCosts(StepCost(1.0, 0.0))
    for _ in range(20):
        costs.observe(StepWork(1.0, 0.0, extra=ExtraWork(1.0, 1.0)), 2.0)
    assert costs.current.fixed_s == pytest.approx(2.0)
    assert costs.current.control_share == 0
