"""Schedules of diffusers and of our tables, run side by side on a small model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
)
from torch import Tensor

from ray_cluster.engine.schedules.sampler_schedules import SamplerTable, add_past
from ray_cluster.kernels.sampler_update.reference import (
    sampler_update,
)

CALL_TOLERANCE = 2e-5
RUN_TOLERANCE = 1e-4
CONTROL_FACTOR = 100
SCHEDULERS: dict[str, Any] = {
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler_ancestral": EulerAncestralDiscreteScheduler,
    "dpmpp_2m": DPMSolverMultistepScheduler,
    "lcm": LCMScheduler,
    "pndm": PNDMScheduler,
}
NOISY = ("euler_ancestral", "lcm")
STEPS = (1, 2, 5, 8, 20, 33, 50)
SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SHAPE = (1, 4, 6, 5)


def config(**changes: Any) -> dict[str, Any]:
    """A model's own scheduler_config."""
    values: dict[str, Any] = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": "epsilon",
        "timestep_spacing": "leading",
    }
    return dict(DDIMScheduler(**(values | changes)).config)


def model(x: Tensor, timestep: float) -> Tensor:
    """Stands in for a UNet: smooth, bounded, mixing channels, aware of the timestep."""
    mixing = torch.linspace(-0.4, 0.4, 16, dtype=x.dtype).reshape(4, 4)
    return torch.tanh(torch.einsum("ij,bjhw->bihw", mixing, x) + timestep / 1000)


def start() -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SHAPE, generator=generator), generator


def by_diffusers(settings: dict[str, Any], sampler: str, num_steps: int) -> Tensor:
    # 'pndm' is the method without Runge-Kutta steps, whatever the model was saved with
    options = {"skip_prk_steps": True} if sampler == "pndm" else {}
    scheduler = SCHEDULERS[sampler].from_config(settings, **options)
    scheduler.set_timesteps(num_steps)
    return by_scheduler(scheduler, sampler)


def by_scheduler(scheduler: Any, sampler: str) -> Tensor:
    """Take the steps that a scheduler of diffusers has set."""
    x, generator = start()
    x = x * scheduler.init_noise_sigma
    extra = {"generator": generator} if sampler in NOISY else {}
    for timestep in scheduler.timesteps:
        output = model(scheduler.scale_model_input(x, timestep), float(timestep))
        x = scheduler.step(output, timestep, x, return_dict=False, **extra)[0]
    return x


def by_table(table: SamplerTable, dtype: torch.dtype = torch.float32) -> Tensor:
    x, generator = start()
    x = x.to(dtype) * table.init_noise_sigma
    history, outputs = torch.zeros_like(x), None
    for index in range(table.num_calls):
        output = model(x * table.input_scale[index].to(dtype), float(table.timesteps[index]))
        noise = torch.zeros(SHAPE)
        if table.takes_noise[index]:
            noise = torch.randn(SHAPE, generator=generator)
        x, history = sampler_update(
            x, output, history, noise.to(dtype), table.coefficients[index : index + 1]
        )
        outputs = add_past(table, index, x[0], output[0], outputs)
    return x


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, of large values relative to them."""
    worst = float(((one - other).abs() / other.abs().clamp(min=1.0)).max())
    return float("inf") if math.isnan(worst) else worst


def cases() -> list[Any]:
    found = []
    for prediction in PREDICTIONS:
        for spacing in SPACINGS:
            for is_zero_snr in (False, True):
                if is_zero_snr and prediction == "epsilon":
                    continue
                settings = config(
                    prediction_type=prediction,
                    timestep_spacing=spacing,
                    rescale_betas_zero_snr=is_zero_snr,
                )
                name = f"{prediction}-{spacing}{'-zero_snr' if is_zero_snr else ''}"
                found.append(pytest.param(settings, id=name))
    return found


def is_rounded_by_diffusers(settings: dict[str, Any], sampler: str) -> bool:
    return bool(settings["rescale_betas_zero_snr"]) and sampler.startswith("euler")
