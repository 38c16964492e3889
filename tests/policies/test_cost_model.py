import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs.cost_model import (
    MAX_SURPRISE,
    CostResidual,
    ExtraWork,
    StepWork,
    TimedStep,
    corrected,
    faded,
    fitted_cost,
    further_size_s,
    lora_share,
    observe,
    one_call_s,
    step_s,
    work_of,
)
from ray_cluster.policies.steps.batch_layout import TRIAL_EVERY, TRIAL_STEPS, choose_layout
from ray_cluster.policies.types import StepCost
from tests.fakes import STEP_COST, request_view
from tests.policies.costs import alone_s, batch_s, share_s

durations = st.floats(1e-4, 1e4)


def test_a_step_costs_a_fixed_part_and_a_part_for_all_that_it_computes() -> None:
    cost = StepCost(0.5, 2.0, per_squared_megapixel_s=10.0, per_further_size_s=0.2)
    assert step_s(cost, StepWork(3.0, 0.0)) == pytest.approx(6.5)
    assert step_s(cost, StepWork(3.0, 4.0, num_sizes=3)) == pytest.approx(46.9)
    assert step_s(cost, StepWork(0.0, 0.0, num_sizes=0)) == pytest.approx(0.5)


@given(st.floats(0, 9), st.floats(0, 9), st.integers(1, 6))
def test_the_layout_that_is_chosen_is_the_one_that_takes_less_time(
    fixed_s: float, further_s: float, num_sizes: int
) -> None:
    cost = StepCost(fixed_s, 1.0, per_further_size_s=further_s)
    seconds = {"mixed": fixed_s + further_s * (num_sizes - 1), "grouped": fixed_s * num_sizes}
    chosen = choose_layout(num_sizes, cost)
    layouts = [choose_layout(num_sizes, cost, step=step) for step in range(2 * TRIAL_EVERY)]
    trials = (["mixed"] * TRIAL_STEPS + [chosen] * (TRIAL_EVERY - TRIAL_STEPS)) * 2
    assert layouts == trials
    assert seconds[chosen] == pytest.approx(min(seconds.values()))
    work = StepWork(2.0, 0.0, num_sizes)
    assert step_s(cost, work) == pytest.approx(2.0 + min(seconds.values()))


def test_a_fitted_cost_is_the_one_that_the_steps_were_made_with() -> None:
    cost = StepCost(0.3, 2.0, per_further_size_s=0.1, source="measured")
    size, other = (1000, 500), (500, 500)

    def seconds(megapixels: float, num_sizes: int = 1) -> float:
        return step_s(cost, StepWork(megapixels, 0.0, num_sizes))

    found = fitted_cost(
        size,
        alone_s=seconds(0.5),
        together_s=seconds(4.0),
        num_together=8,
        beside=(other, seconds(0.75, 2)),
    )
    assert found.fixed_s == pytest.approx(cost.fixed_s)
    assert found.per_megapixel_s == pytest.approx(cost.per_megapixel_s)
    assert found.per_further_size_s == pytest.approx(cost.per_further_size_s)
    assert found.source == "measured"


def test_steps_whose_times_contradict_each_other_fit_no_negative_cost() -> None:
    found = fitted_cost(
        (1000, 1000), alone_s=1.0, together_s=0.9, num_together=4, beside=((500, 500), 0.5)
    )
    assert found.fixed_s == 1.0
    assert found.per_megapixel_s == pytest.approx(0.01)
    assert found.per_further_size_s == 0


def test_a_further_size_is_what_the_steps_of_several_take_more_than_a_cost_says() -> None:
    cost = StepCost(0.5, 2.0, per_squared_megapixel_s=1.0, per_further_size_s=9.0)
    works = (StepWork(1.0, 0.5, 1), StepWork(2.0, 1.0, 2), StepWork(4.0, 3.0, 4))
    # more than another model call: then that is what a step is expected to take
    real = replace(cost, per_further_size_s=0.75)
    steps = [TimedStep(work, one_call_s(real, work)) for work in works]
    assert further_size_s(cost, steps) == pytest.approx(0.75)
    assert one_call_s(real, works[2]) == pytest.approx(step_s(real, works[2]) + 3 * 0.25)
    # steps of one size say nothing of it, and it is never a gain
    assert further_size_s(cost, steps[:1]) == 0
    assert further_size_s(cost, [replace(steps[1], seconds=0.1)]) == 0


def test_the_work_of_a_batch_counts_model_rows_and_sizes() -> None:
    large = request_view(width_px=2000, height_px=1000, uses_guidance=True)
    work = work_of([large, request_view(), request_view(width_px=500)])
    assert work.megapixels == pytest.approx(4 + 1 + 0.5)
    assert work.squared_megapixels == pytest.approx(8 + 1 + 0.25)
    assert work.num_sizes == 3
    assert work_of([]) == StepWork(0.0, 0.0, 0)


def test_a_request_alone_takes_its_steps_of_that_work() -> None:
    cost = StepCost(0.1, 1.0, per_squared_megapixel_s=3.0)
    request = request_view(width_px=500, uses_guidance=True)
    assert alone_s(cost, request) == pytest.approx(10 * step_s(cost, work_of([request])))
    assert batch_s(cost, request, 4) == pytest.approx(10 * step_s(cost, work_of([request] * 4)))


def test_guidance_doubles_the_megapixels_but_not_the_fixed_part() -> None:
    assert alone_s(STEP_COST, request_view()) == pytest.approx(10 * 1.1)
    assert alone_s(STEP_COST, request_view(uses_guidance=True)) == pytest.approx(10 * 2.1)


def test_only_the_remaining_steps_cost() -> None:
    assert alone_s(STEP_COST, request_view(steps_done=9)) == pytest.approx(1.1)
    assert alone_s(STEP_COST, request_view(steps_done=10)) == 0


@given(st.integers(1, 64))
def test_the_shares_of_a_full_batch_add_up_to_the_time_of_the_batch(max_batch: int) -> None:
    share = share_s(STEP_COST, request_view(), max_batch)
    assert share * max_batch == pytest.approx(batch_s(STEP_COST, request_view(), max_batch))


@given(st.integers(1, 63))
def test_a_larger_batch_makes_the_share_smaller_and_the_batch_longer(batch: int) -> None:
    request = request_view()
    assert share_s(STEP_COST, request, batch + 1) < share_s(STEP_COST, request, batch)
    assert batch_s(STEP_COST, request, batch + 1) > batch_s(STEP_COST, request, batch)


@given(st.floats(1 / MAX_SURPRISE, MAX_SURPRISE), st.integers(1, 100))
def test_a_constant_error_is_learnt_exactly(factor: float, num_observations: int) -> None:
    residual = CostResidual()
    for _ in range(num_observations):
        residual = observe(residual, predicted_s=2.0, observed_s=2.0 * factor)
    assert residual.factor == pytest.approx(factor)
    assert corrected(STEP_COST, residual).fixed_s == pytest.approx(0.1 * factor)
    assert corrected(STEP_COST, residual).per_megapixel_s == pytest.approx(1.0 * factor)
    cost = StepCost(0.5, 2.0, per_squared_megapixel_s=10.0, per_further_size_s=100.0)
    work = StepWork(1.5, 0.5, 2)
    assert step_s(corrected(cost, residual), work) == pytest.approx(factor * step_s(cost, work))


def test_a_new_speed_is_learnt_within_a_few_windows() -> None:
    residual = CostResidual()
    for _ in range(1000):
        residual = observe(residual, predicted_s=1.0, observed_s=1.0)
    for _ in range(64):
        residual = observe(residual, predicted_s=1.0, observed_s=2.0)
    assert residual.factor == pytest.approx(2.0, rel=0.02)


def test_one_stall_moves_a_settled_correction_by_little() -> None:
    residual = CostResidual()
    for _ in range(100):
        residual = observe(residual, predicted_s=1.0, observed_s=1.0)
    assert observe(residual, predicted_s=1.0, observed_s=1e6).factor < 1.1


@given(st.lists(st.tuples(durations, durations)))
def test_the_correction_stays_within_the_largest_surprise(
    observations: list[tuple[float, float]],
) -> None:
    residual = CostResidual()
    for predicted_s, observed_s in observations:
        residual = observe(residual, predicted_s=predicted_s, observed_s=observed_s)
    assert abs(residual.log_factor) <= math.log(MAX_SURPRISE) + 1e-9


@pytest.mark.parametrize(("predicted_s", "observed_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_durations_that_are_not_positive_say_nothing(predicted_s: float, observed_s: float) -> None:
    residual = CostResidual(0.3, 5)
    assert observe(residual, predicted_s=predicted_s, observed_s=observed_s) == residual


def test_a_silence_brings_a_correction_back_and_makes_the_next_observations_count_more() -> None:
    residual = CostResidual()
    for _ in range(50):
        residual = observe(residual, predicted_s=1.0, observed_s=4.0)
    assert faded(residual, 60.0, step_s=0.1).factor == pytest.approx(2.0)
    assert faded(residual, 0.0, step_s=0.1).factor == pytest.approx(4.0)
    later = faded(residual, 240.0, step_s=0.1)
    assert later.factor == pytest.approx(4.0 ** (1 / 16))
    assert observe(later, predicted_s=1.0, observed_s=2.0).factor > 1.4
    # slow steps are waited for
    assert faded(residual, 60.0, step_s=60.0).factor > 3.7


def test_the_share_of_loras_is_what_steps_with_them_take_more_than_a_cost_says() -> None:
    cost = StepCost(0.3, 2.0, lora_share=0.25)

    def step(megapixels: float, num_loras: int, seconds: float | None = None) -> TimedStep:
        extra = ExtraWork(lora_megapixels=num_loras * megapixels)
        work = StepWork(megapixels, 0.0, extra=extra)
        return TimedStep(work, step_s(cost, work) if seconds is None else seconds)

    steps = [step(0.5, 1), step(4.0, 1), step(1.0, 3)]
    assert lora_share(replace(cost, lora_share=0.9), steps) == pytest.approx(0.25)
    # steps of noise that seem to cost less with LoRAs make nothing cheaper
    assert lora_share(cost, [step(0.5, 1, 1.0)]) == 0
    priced, blind = request_view("a", loras=("x",)), request_view("a")
    assert alone_s(cost, priced) > alone_s(cost, blind)
    assert alone_s(replace(cost, lora_share=0.0), priced) == alone_s(cost, blind)
