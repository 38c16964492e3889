"""The schedule of flow-matching models against diffusers' own scheduler, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from ray_cluster.engine.schedules.flow_schedules import FlowModel
from ray_cluster.engine.schedules.sampler_schedules import SamplerTable
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.errors import InvalidRequest
from ray_cluster.kernels.sampler_update.reference import sampler_update
from tests.engine.harness import CONTROL_FACTOR, difference

# the path hardly bends: with 28 steps one more changes little, so that both bounds are narrow
TOLERANCE = 1e-5
SIZE_PX = (768, 512)
CASES = [
    ({"shift": 1.0}, False),
    ({"shift": 3.0}, False),
    ({"shift": 3.0, "use_dynamic_shifting": True}, True),
    ({"shift": 1.0}, True),
    ({"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.02}, False),
    ({"shift": 3.0, "use_karras_sigmas": True}, False),
]


def tables(settings: dict[str, Any], *, spaces_sigmas: bool) -> SamplerTables:
    config = FlowMatchEulerDiscreteScheduler(**settings).config
    return SamplerTables(config, FlowModel(16, spaces_sigmas=spaces_sigmas))


def model(latents: Tensor, timestep: Tensor) -> Tensor:
    return torch.sin(3 * latents) + timestep / 1000


def start() -> Tensor:
    return torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def by_table(table: SamplerTable) -> Tensor:
    latents, denoised = start(), torch.zeros(1, 4, 8, 8)
    for timestep, row in zip(table.timesteps, table.coefficients, strict=True):
        output = model(latents, timestep)
        latents, denoised = sampler_update(latents, output, denoised, None, row[None])
    # the last step goes all the way to the estimate
    assert difference(latents, denoised) <= 1e-5
    return latents


def by_diffusers(settings: dict[str, Any], num_steps: int, *, spaces_sigmas: bool) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    options: dict[str, Any] = {}
    if spaces_sigmas:
        options["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    if settings.get("use_dynamic_shifting"):
        options["mu"] = calculate_shift(48 * 32)
    scheduler.set_timesteps(num_steps, **options)
    latents = start()
    for timestep in scheduler.timesteps:
        latents = scheduler.step(model(latents, timestep), timestep, latents).prev_sample
    return latents


@pytest.mark.parametrize(("settings", "spaces_sigmas"), CASES)
@pytest.mark.parametrize("num_steps", [1, 2, 4, 28])
def test_a_whole_schedule_equals_the_schedulers_own_steps(
    settings: dict[str, Any], num_steps: int, *, spaces_sigmas: bool
) -> None:
    if num_steps == 1 and "shift_terminal" in settings:
        pytest.skip("one step cannot begin at 1 and end at shift_terminal")
    expected = by_diffusers(settings, num_steps, spaces_sigmas=spaces_sigmas)
    ours = tables(settings, spaces_sigmas=spaces_sigmas)
    found = by_table(ours.table("flow_match_euler", num_steps, SIZE_PX))
    assert difference(found, expected) <= TOLERANCE
    neighbour = by_table(ours.table("flow_match_euler", num_steps + 1, SIZE_PX))
    assert difference(neighbour, expected) >= CONTROL_FACTOR * TOLERANCE


def test_a_schedule_depends_on_the_size_only_where_the_model_says_so() -> None:
    moving = tables({"use_dynamic_shifting": True}, spaces_sigmas=True)
    fixed = tables({"shift": 3.0}, spaces_sigmas=True)
    small, large = (256, 256), (1024, 512)
    timesteps = [moving.table("flow_match_euler", 4, size).timesteps for size in (small, large)]
    assert (timesteps[1][1:] > timesteps[0][1:]).all(), "larger images stay longer in the noise"
    assert moving.table("flow_match_euler", 4, (512, 1024)) is moving.table(
        "flow_match_euler", 4, large
    ), "equally many tokens"
    assert fixed.table("flow_match_euler", 4, small) is fixed.table("flow_match_euler", 4, large)


def test_more_steps_than_the_model_was_trained_with_are_refused() -> None:
    ours = tables({}, spaces_sigmas=False)
    assert ours.max_steps("flow_match_euler", 5000) == 1000
    with pytest.raises(InvalidRequest, match="cannot take 1001 steps; allowed: 1 to 1000"):
        ours.table("flow_match_euler", 1001)
