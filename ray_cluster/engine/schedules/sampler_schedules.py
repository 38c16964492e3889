"""How each sampler's schedule becomes coefficients, from diffusers' own timestep and sigma tables.

Computed in float64, kept in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
)
from torch import Tensor

_INF = float("inf")
# outputs of earlier steps that a sampler takes at most
_MAX_PAST = 3


@dataclass(frozen=True, slots=True)
class SamplerTable:
    """The schedule of one sampler for one number of steps.

    Attributes:
        timesteps: ``[n]`` float32, what the model is called with.
        input_scale: ``[n]`` float32, factor on the latents before the model call.
        coefficients: ``[n, 8]`` float32, see ``sampler_update``.
        takes_noise: per step, whether the sampler draws noise from the request's generator.
        past: per step the weights of earlier outputs of the model, the newest first; empty where
            no step has any.
        keeps_output: per step, whether a later one counts its output among those.
        init_noise_sigma: factor on the initial noise.
        levels: before each step, and after the last, the weights of clean latents and of noise in
            latents of that level.
        packed: per step ``[10]``, its timestep, input scale and coefficients in one tensor, so
            that a batch gathers them, and moves them to the device, at once.
    """

    timesteps: Tensor
    input_scale: Tensor
    coefficients: Tensor
    takes_noise: tuple[bool, ...]
    past: tuple[tuple[float, ...], ...]
    keeps_output: tuple[bool, ...]
    init_noise_sigma: float
    levels: tuple[tuple[float, float], ...]
    packed: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        columns = [self.timesteps[:, None], self.input_scale[:, None], self.coefficients]
        object.__setattr__(self, "packed", torch.cat(columns, dim=1).unbind())

    @property
    def num_calls(self) -> int:
        """Number of model calls: as many as steps were asked for, and one more with ``pndm``."""
        return len(self.timesteps)


@dataclass(frozen=True, slots=True)
class Step:
    """One step before it becomes a row of the table; names as in ``sampler_update``.

    Attributes:
        level: weights of clean latents and of noise in the latents that it begins with.
    """

    timestep: float
    level: tuple[float, float]
    from_latents: float
    from_output: float
    keep: float
    toward: float
    direct: float = 0.0
    history: float = 0.0
    noise: float = 0.0
    input_scale: float = 1.0
    draws: bool = False
    past: tuple[float, ...] = ()
    keeps_output: bool = False

    def row(self, clip: float) -> list[float]:
        """Return its coefficients, in the order of ``sampler_update``."""
        return [
            self.from_latents,
            self.from_output,
            self.keep,
            self.direct,
            self.toward,
            self.history,
            self.noise,
            clip,
        ]


def assemble(steps: Sequence[Step], *, clip: float, init_noise_sigma: float) -> SamplerTable:
    """Return the table of a schedule's steps, or of its last ones."""
    return SamplerTable(
        timesteps=torch.tensor([step.timestep for step in steps]),
        input_scale=torch.tensor([step.input_scale for step in steps]),
        coefficients=torch.tensor([step.row(clip) for step in steps], dtype=torch.float32),
        takes_noise=tuple(step.draws for step in steps),
        past=tuple(step.past for step in steps) if any(step.past for step in steps) else (),
        keeps_output=tuple(step.keeps_output for step in steps),
        init_noise_sigma=init_noise_sigma,
        levels=(*(step.level for step in steps), (1.0, 0.0)),
    )


def add_past(
    table: SamplerTable, step_index: int, latents: Tensor, output: Tensor, outputs: Tensor | None
) -> Tensor | None:
    """Add what a multistep sampler takes of earlier outputs of the model.

    Args:
        latents: ``[C, H, W]`` after ``sampler_update``; changed in place.
        output: ``[C, H, W]``, the model's output of this step, after guidance.
        outputs: ``[k, C, H, W]`` of earlier steps, the newest first; None before the first.

    Returns:
        The outputs for the next step; None for samplers that take none.
    """
    if not table.past:
        return None
    for number, weight in enumerate(table.past[step_index]):
        assert outputs is not None, "the first step has no past"
        latents += weight * outputs[number]
    if not table.keeps_output[step_index]:
        return outputs
    return torch.cat([output[None], *([] if outputs is None else [outputs[: _MAX_PAST - 1]])])


def _clip_range(config: Mapping[str, Any]) -> float:
    return float(config.clip_sample_range) if config.clip_sample else _INF  # type: ignore[attr-defined]


def denoised_from_vp(prediction_type: str, alpha: float, sigma: float) -> tuple[float, float]:
    """Coefficients of (x, m) in the denoised estimate, for latents ``alpha * x0 + sigma * z``."""
    if prediction_type == "epsilon":
        return 1.0 / alpha, -sigma / alpha
    if prediction_type == "v_prediction":
        return alpha, -sigma
    return 0.0, 1.0


def _denoised_from_ve(prediction_type: str, sigma: float) -> tuple[float, float]:
    """Coefficients of (x, m) in the denoised estimate, for latents ``x0 + sigma * z``."""
    if prediction_type == "epsilon":
        return 1.0, -sigma
    if prediction_type == "v_prediction":
        return 1.0 / (sigma**2 + 1.0), -sigma / (sigma**2 + 1.0) ** 0.5
    return 0.0, 1.0


def timesteps_of(scheduler: Any) -> list[float]:
    """Return the timesteps of a schedule.

    Trailing spacing can end with one of -1 too many, by rounding (61 steps of 1000): that is left
    out. diffusers would call the model once more, with a timestep that it was never trained for.
    Continuous ones are logarithms of noise levels, and half of them negative.
    """
    timesteps: list[float] = scheduler.timesteps.tolist()
    if scheduler.config.get("timestep_type") == "continuous":
        return timesteps
    return [one for one in timesteps if one >= 0]


def _sigmas(scheduler: Any) -> Tensor:
    """Return the noise levels between which the steps of a schedule go, in float64.

    Where a timestep too many is left out, the last step goes to where that would have ended.
    """
    sigmas: Tensor = scheduler.sigmas.double()
    num_steps = len(timesteps_of(scheduler))
    if num_steps == len(scheduler.timesteps):
        return sigmas
    return torch.cat([sigmas[:num_steps], sigmas[-1:]])


def ddim(config: Mapping[str, Any], num_steps: int, first_step: int = 0) -> SamplerTable:
    """DDIM with eta 0: deterministic, in the variance-preserving scale."""
    scheduler = DDIMScheduler.from_config(config)
    scheduler.set_timesteps(num_steps)
    alphas = scheduler.alphas_cumprod.double()
    kind = scheduler.config.prediction_type
    stride = scheduler.config.num_train_timesteps // num_steps
    steps = []
    for timestep in map(int, timesteps_of(scheduler)):
        before = timestep - stride
        kept = float(alphas[before] if before >= 0 else scheduler.final_alpha_cumprod)
        alpha, sigma = float(alphas[timestep]) ** 0.5, (1.0 - float(alphas[timestep])) ** 0.5
        direction = (1.0 - kept) ** 0.5
        # predicted noise = noise_x * x + noise_m * m, from the estimate before clipping
        noise_x, noise_m = {
            "epsilon": (0.0, 1.0),
            "v_prediction": (sigma, alpha),
            "sample": (1.0 / sigma, -alpha / sigma),
        }[kind]
        from_latents, from_output = denoised_from_vp(kind, alpha, sigma)
        steps.append(
            Step(
                timestep=float(timestep),
                level=(alpha, sigma),
                from_latents=from_latents,
                from_output=from_output,
                keep=direction * noise_x,
                direct=direction * noise_m,
                toward=kept**0.5,
            )
        )
    clip = _clip_range(scheduler.config)
    return assemble(steps[first_step:], clip=clip, init_noise_sigma=1.0)


def euler(config: Mapping[str, Any], num_steps: int, first_step: int = 0) -> SamplerTable:
    """Euler's method on the probability-flow ODE."""
    scheduler = EulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(num_steps)
    return _sigma_space(scheduler, first_step, ancestral=False)


def euler_ancestral(config: Mapping[str, Any], num_steps: int, first_step: int = 0) -> SamplerTable:
    """Euler's method to a lower noise level than the step's end, then fresh noise."""
    scheduler = EulerAncestralDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(num_steps)
    return _sigma_space(scheduler, first_step, ancestral=True)


def _sigma_space(scheduler: Any, first_step: int, *, ancestral: bool) -> SamplerTable:
    """Return Euler's steps, in the variance-exploding scale."""
    timesteps = timesteps_of(scheduler)
    sigmas = _sigmas(scheduler).tolist()
    steps = []
    for index, timestep in enumerate(timesteps):
        sigma, target = sigmas[index], sigmas[index + 1]
        up = 0.0
        if ancestral:
            up = (target**2 * (sigma**2 - target**2) / sigma**2) ** 0.5
            target = (target**2 - up**2) ** 0.5
        from_latents, from_output = _denoised_from_ve(scheduler.config.prediction_type, sigma)
        steps.append(
            Step(
                timestep=timestep,
                level=(1.0, sigma),
                input_scale=1.0 / (sigma**2 + 1.0) ** 0.5,
                from_latents=from_latents,
                from_output=from_output,
                keep=target / sigma,
                toward=1.0 - target / sigma,
                noise=up,
                draws=ancestral,
            )
        )
    init_noise_sigma = float(scheduler.init_noise_sigma)
    return assemble(steps[first_step:], clip=_INF, init_noise_sigma=init_noise_sigma)


def dpmpp_2m(config: Mapping[str, Any], num_steps: int, first_step: int = 0) -> SamplerTable:
    """DPM-Solver++ (2M, midpoint): two-step multistep in log-SNR time; its first has no history."""
    scheduler = DPMSolverMultistepScheduler.from_config(
        config, algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint"
    )
    scheduler.set_timesteps(num_steps)
    timesteps = timesteps_of(scheduler)
    sigmas = _sigmas(scheduler)
    alphas = (1.0 / (sigmas**2 + 1.0) ** 0.5).tolist()
    spreads = (sigmas / (sigmas**2 + 1.0) ** 0.5).tolist()
    # log signal-to-noise of every point; infinite at the end of a schedule that ends at zero
    lambdas = (-torch.log(sigmas)).tolist()
    count = len(timesteps)
    settings = scheduler.config
    euler_last = (
        settings.euler_at_final
        or (settings.lower_order_final and count < 15)
        or settings.final_sigmas_type == "zero"
    )
    steps = []
    for index, timestep in enumerate(timesteps):
        gap = lambdas[index + 1] - lambdas[index]
        weight = -alphas[index + 1] * float(torch.expm1(torch.tensor(-gap, dtype=torch.float64)))
        toward, history = weight, 0.0
        if index > first_step and not (index == count - 1 and euler_last):
            # 0 where the schedule stands still, as the weight is then
            inverse_ratio = gap / (lambdas[index] - lambdas[index - 1])
            toward, history = weight * (1.0 + 0.5 * inverse_ratio), -weight * 0.5 * inverse_ratio
        from_latents, from_output = denoised_from_vp(
            settings.prediction_type, alphas[index], spreads[index]
        )
        steps.append(
            Step(
                timestep=float(timestep),
                level=(alphas[index], spreads[index]),
                from_latents=from_latents,
                from_output=from_output,
                keep=spreads[index + 1] / spreads[index],
                toward=toward,
                history=history,
            )
        )
    init_noise_sigma = float(scheduler.init_noise_sigma)
    return assemble(steps[first_step:], clip=_INF, init_noise_sigma=init_noise_sigma)


def lcm(config: Mapping[str, Any], num_steps: int, first_step: int = 0) -> SamplerTable:
    """Latent consistency sampling: jump to the estimate, then add fresh noise."""
    scheduler = LCMScheduler.from_config(config)
    scheduler.set_timesteps(num_steps)
    alphas = scheduler.alphas_cumprod.double().tolist()
    timesteps = [int(one) for one in timesteps_of(scheduler)]
    steps = []
    for index, timestep in enumerate(timesteps):
        is_last = index == len(timesteps) - 1
        skip, out = scheduler.get_scalings_for_boundary_condition_discrete(timestep)
        kept = 1.0 if is_last else alphas[timesteps[index + 1]]
        level = (alphas[timestep] ** 0.5, (1.0 - alphas[timestep]) ** 0.5)
        from_latents, from_output = denoised_from_vp(scheduler.config.prediction_type, *level)
        steps.append(
            Step(
                timestep=float(timestep),
                level=level,
                from_latents=from_latents,
                from_output=from_output,
                keep=kept**0.5 * skip,
                toward=kept**0.5 * out,
                noise=(1.0 - kept) ** 0.5,
                draws=not is_last,
            )
        )
    clip = _clip_range(scheduler.config)
    return assemble(steps[first_step:], clip=clip, init_noise_sigma=1.0)
