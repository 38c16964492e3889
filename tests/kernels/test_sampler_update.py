"""The coefficient tables and the batched update against each diffusers scheduler's own `step`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
)
from torch import Tensor

from ray_cluster.engine.schedules.sampler_schedules import SamplerTable
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.errors import InvalidRequest
from ray_cluster.kernels.sampler_update.reference import (
    DIRECT,
    FROM_OUTPUT,
    HISTORY,
    NOISE,
    TOWARD,
)
from ray_cluster.requests import SAMPLER_NAMES
from tests.kernels.schedules import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    NOISY,
    PREDICTIONS,
    RUN_TOLERANCE,
    SCHEDULERS,
    SHAPE,
    SPACINGS,
    STEPS,
    by_diffusers,
    by_scheduler,
    by_table,
    cases,
    config,
    gap,
    is_rounded_by_diffusers,
    model,
    start,
)


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
@pytest.mark.parametrize("settings", cases())
def test_a_whole_schedule_equals_the_schedulers_own_steps(
    settings: dict[str, Any], sampler: Any
) -> None:
    tables = SamplerTables(settings)
    if sampler not in tables.names:
        with pytest.raises(InvalidRequest, match="not defined for this model"):
            tables.table(sampler, 5)
        return
    if is_rounded_by_diffusers(settings, sampler):
        pytest.skip("has a test of its own: diffusers starts from sigma 4096 in float32")
    for num_steps in STEPS:
        expected = by_diffusers(settings, sampler, num_steps)
        found = by_table(tables.table(sampler, num_steps))
        tolerance = CALL_TOLERANCE if num_steps <= 20 else RUN_TOLERANCE
        assert gap(found, expected) <= tolerance, num_steps


def euler_in_float64(settings: dict[str, Any], sampler: str, num_steps: int) -> Tensor:
    """Both Euler samplers for v-prediction and sample prediction, their formulas written out."""
    scheduler = SCHEDULERS[sampler].from_config(settings)
    scheduler.set_timesteps(num_steps)
    sigmas = scheduler.sigmas.double()
    x, generator = start()
    x = x.double() * float(scheduler.init_noise_sigma)
    for sigma, end, timestep in zip(sigmas, sigmas[1:], scheduler.timesteps, strict=False):
        output = model(x / (sigma**2 + 1).sqrt(), float(timestep))
        clean = output
        if settings["prediction_type"] == "v_prediction":
            clean = x / (sigma**2 + 1) - output * sigma / (sigma**2 + 1).sqrt()
        fresh, noise = torch.zeros(()), torch.zeros(())
        if sampler == "euler_ancestral":
            fresh = end * (1 - (end / sigma) ** 2).sqrt()
            noise = torch.randn(SHAPE, generator=generator).double()
        target = (end**2 - fresh**2).clamp(min=0).sqrt()
        x = x + (x - clean) / sigma * (target - sigma) + fresh * noise
    return x


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize(
    ("sampler", "prediction"),
    [("euler", "v_prediction"), ("euler", "sample"), ("euler_ancestral", "v_prediction")],
)
def test_from_infinite_noise_the_update_is_nearer_to_the_truth_than_diffusers(
    sampler: Any, prediction: str, spacing: str
) -> None:
    """float32 at sigma 4096 is 2e-4 coarse; diffusers adds and takes away numbers of that size."""
    settings = config(
        prediction_type=prediction, timestep_spacing=spacing, rescale_betas_zero_snr=True
    )
    tables = SamplerTables(settings)
    for num_steps in STEPS:
        truth = euler_in_float64(settings, sampler, num_steps)
        ours = gap(by_table(tables.table(sampler, num_steps)).double(), truth)
        theirs = gap(by_diffusers(settings, sampler, num_steps).double(), truth)
        assert ours <= max(theirs, CALL_TOLERANCE), num_steps
        # and the formulas written out here are those of diffusers
        assert theirs <= 5e-3, num_steps


@pytest.mark.parametrize("sampler", ["ddim", "lcm"])
@pytest.mark.parametrize("limit", [0.3, 1.0])
def test_clipped_estimates_are_clipped_as_the_scheduler_does(sampler: Any, limit: float) -> None:
    for prediction in PREDICTIONS:
        settings = config(prediction_type=prediction, clip_sample=True, clip_sample_range=limit)
        expected = by_diffusers(settings, sampler, 7)
        assert gap(by_table(SamplerTables(settings).table(sampler, 7)), expected) <= CALL_TOLERANCE
        if prediction == "sample" and limit == 1.0:
            # this model's own outputs are within the limit
            continue
        unclipped = SamplerTables(settings | {"clip_sample": False}).table(sampler, 7)
        assert gap(by_table(unclipped), expected) >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True},
        {"final_sigmas_type": "sigma_min"},
        {"interpolation_type": "log_linear"},
        {"euler_at_final": True},
        {"lower_order_final": False},
        {"use_lu_lambdas": True},
        {"set_alpha_to_one": True, "steps_offset": 0},
        {"beta_schedule": "linear"},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"num_train_timesteps": 500},
        {"algorithm_type": "sde-dpmsolver++", "solver_order": 3},
        {"timestep_type": "continuous", "prediction_type": "v_prediction"},
    ],
    ids=str,
)
def test_options_of_a_models_own_config_are_honoured_as_by_the_scheduler(
    changes: dict[str, Any],
) -> None:
    settings = config() | changes
    for sampler in SAMPLER_NAMES:
        expected = settings
        if sampler == "dpmpp_2m":
            # the sampler's name says which solver it is, whatever the model was saved with
            expected = settings | {"algorithm_type": "dpmsolver++", "solver_order": 2}
        for num_steps in (3, 16):
            found = by_table(SamplerTables(settings).table(sampler, num_steps))
            assert gap(found, by_diffusers(expected, sampler, num_steps)) <= CALL_TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_wrong_tables_show(sampler: Any) -> None:
    """A wrong timestep, each coefficient off by a step, a lost history, a lost noise."""
    settings = config(prediction_type="v_prediction", timestep_spacing="trailing")
    table = SamplerTables(settings).table(sampler, 8)
    expected = by_diffusers(settings, sampler, 8)
    wrong = {
        "timestep": replace(table, timesteps=table.timesteps - 50),
        "order": replace(table, coefficients=table.coefficients.flip(0)),
        "shift": replace(table, coefficients=table.coefficients.roll(1, dims=0)),
        "output": replace(table, coefficients=without(table, FROM_OUTPUT)),
        "estimate": replace(table, coefficients=without(table, TOWARD)),
    }
    if sampler == "dpmpp_2m":
        wrong["history"] = replace(table, coefficients=without(table, HISTORY))
    if sampler in NOISY:
        wrong["noise"] = replace(table, coefficients=without(table, NOISE))
        wrong["no draws"] = replace(table, takes_noise=(False,) * 8)
    if sampler == "pndm":
        # what its latents become does not come from the estimate
        del wrong["estimate"]
        wrong["output"] = replace(table, coefficients=without(table, DIRECT))
        wrong["past"] = replace(table, past=tuple(one[::-1] for one in table.past))
        wrong["kept"] = replace(table, keeps_output=(True,) * 9)
    assert gap(by_table(table), expected) <= CALL_TOLERANCE
    for name, each in wrong.items():
        assert gap(by_table(each), expected) >= CONTROL_FACTOR * CALL_TOLERANCE, name


def without(table: SamplerTable, column: int) -> Tensor:
    coefficients = table.coefficients.clone()
    coefficients[:, column] = 0
    return coefficients


def by_diffusers_without_the_last(settings: dict[str, Any], sampler: str, num_steps: int) -> Tensor:
    """Run a scheduler of diffusers whose timestep of -1 was taken out."""
    scheduler = SCHEDULERS[sampler].from_config(settings)
    scheduler.set_timesteps(num_steps)
    assert len(scheduler.timesteps) == num_steps + 1
    assert int(scheduler.timesteps[-1]) == -1
    scheduler.timesteps = scheduler.timesteps[:-1]
    if hasattr(scheduler, "sigmas"):
        scheduler.sigmas = torch.cat([scheduler.sigmas[:num_steps], scheduler.sigmas[-1:]])
    # the last step of a multistep sampler is known by their number
    scheduler.num_inference_steps = num_steps
    return by_scheduler(scheduler, sampler)


@pytest.mark.parametrize("sampler", ["ddim", "euler", "euler_ancestral", "dpmpp_2m"])
@pytest.mark.parametrize("num_steps", [61, 122])
def test_a_timestep_too_many_is_left_out(sampler: Any, num_steps: int) -> None:
    """Diffusers schedules one more, -1, which no model was trained for."""
    settings = config(timestep_spacing="trailing")
    table = SamplerTables(settings).table(sampler, num_steps)
    assert table.num_calls == num_steps
    expected = by_diffusers_without_the_last(settings, sampler, num_steps)
    assert gap(by_table(table), expected) <= RUN_TOLERANCE


@pytest.mark.parametrize("num_steps", [61, 122])
def test_a_timestep_too_many_is_left_out_where_it_would_spoil_the_image(num_steps: int) -> None:
    """Diffusers schedules one more, -1, and DDIM takes that for the last one: pure noise."""
    settings = config(
        prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True
    )
    theirs = DDIMScheduler.from_config(settings)
    theirs.set_timesteps(num_steps)
    assert int(theirs.timesteps[-1]) == -1
    tables = SamplerTables(settings)
    table = tables.table("ddim", num_steps)
    assert table.num_calls == num_steps
    neighbour = by_table(tables.table("ddim", num_steps - 1))
    assert gap(by_table(table), neighbour) < 0.1
    assert gap(by_diffusers(settings, "ddim", num_steps), neighbour) > 1.0
