"""PNDM's linear multistep method (PLMS), the sampler that Stable Diffusion 1's folders name.

Liu et al., Pseudo Numerical Methods for Diffusion Models on Manifolds, without the Runge-Kutta
steps (``skip_prk_steps``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import PNDMScheduler

from ray_cluster.engine.schedules.sampler_schedules import (
    SamplerTable,
    Step,
    assemble,
    denoised_from_vp,
    timesteps_of,
)

# Adams-Bashforth, by how many outputs there are: the present one's weight, then earlier ones'
_WEIGHTS = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


def pndm(config: Mapping[str, Any], num_steps: int, first_step: int = 0) -> SamplerTable:
    """Return the schedule; its first step takes two calls, so that there is one more than steps.

    Whichever step is the first, its own are the two calls. diffusers' pipelines begin later steps
    without the second one, as if there had been one before, and end off the schedule.
    """
    scheduler = PNDMScheduler.from_config(config, skip_prk_steps=True)
    scheduler.set_timesteps(num_steps)
    kind = scheduler.config.prediction_type
    stride = scheduler.config.num_train_timesteps // num_steps
    transition = _Transition(scheduler, kind)
    timesteps = _from([int(one) for one in timesteps_of(scheduler)], first_step)
    steps = []
    for index, timestep in enumerate(timesteps):
        keep, from_output = transition.between(timestep, timestep - stride)
        weights = _WEIGHTS[min(index - (index > 1), len(_WEIGHTS) - 1)]
        if index == 1:
            # the first step once more, with the mean of the outputs at its ends
            first_keep, first_output = transition.between(timesteps[0], timesteps[0] - stride)
            keep, from_output = transition.between(timestep + stride, timestep)
            keep /= first_keep
            weights = (1 / 2, 1 / 2 - keep * first_output / from_output)
        alpha = float(scheduler.alphas_cumprod[timestep].double())
        level = (alpha**0.5, (1.0 - alpha) ** 0.5)
        from_latents, denoised_from_output = denoised_from_vp(kind, *level)
        steps.append(
            Step(
                timestep=float(timestep),
                level=level,
                from_latents=from_latents,
                from_output=denoised_from_output,
                keep=keep,
                toward=0.0,
                direct=from_output * weights[0],
                past=tuple(from_output * weight for weight in weights[1:]),
                keeps_output=index != 1,
            )
        )
    return assemble(steps, clip=float("inf"), init_noise_sigma=1.0)


def _from(timesteps: list[int], first_step: int) -> list[int]:
    """Return the timesteps from a step on, the second one twice, as of a whole schedule."""
    left = [*timesteps[:1], *timesteps[2:]][first_step:]
    return [*left[:2], *left[1:]]


class _Transition:
    """Weights of latents and output in the latents at another timestep."""

    def __init__(self, scheduler: PNDMScheduler, kind: str) -> None:
        self._alphas = scheduler.alphas_cumprod.double().tolist()
        self._last = float(scheduler.final_alpha_cumprod)
        self._predicts_v = kind == "v_prediction"

    def between(self, timestep: int, before: int) -> tuple[float, float]:
        """Return them for a step from one timestep to an earlier one."""
        alpha = self._alphas[timestep]
        target = self._alphas[before] if before >= 0 else self._last
        keep = (target / alpha) ** 0.5
        spread = alpha * (1 - target) ** 0.5 + (alpha * (1 - alpha) * target) ** 0.5
        from_noise = (alpha - target) / spread
        if self._predicts_v:
            # the noise is sigma * x + alpha * v
            return keep + from_noise * (1 - alpha) ** 0.5, from_noise * alpha**0.5
        return keep, from_noise
