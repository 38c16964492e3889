"""How the schedule of a flow-matching model becomes coefficients, from diffusers' own tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler

from ray_cluster.engine.schedules.sampler_schedules import SamplerTable, Step, assemble


@dataclass(frozen=True, slots=True)
class FlowModel:
    """What a schedule depends on beside its scheduler's config.

    Attributes:
        token_px: image pixels along a side of a token.
        spaces_sigmas: whether its diffusers pipeline hands the scheduler sigmas in equal steps
            (FLUX), or leaves them to it (SD3).
    """

    token_px: int
    spaces_sigmas: bool

    def num_tokens(self, size_px: tuple[int, int]) -> int:
        """Return the tokens of an image of that width and height."""
        width_px, height_px = size_px
        return (width_px // self.token_px) * (height_px // self.token_px)


def flow_match_euler(
    config: Mapping[str, Any],
    num_steps: int,
    flow: FlowModel,
    num_tokens: int | None,
    first_step: int = 0,
) -> SamplerTable:
    """Return Euler's method on the straight path from noise to image.

    Args:
        num_tokens: of the image, where the schedule depends on them (dynamic shifting).
    """
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    options: dict[str, Any] = {}
    if flow.spaces_sigmas:
        options["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    if num_tokens is not None:
        options["mu"] = flow_shift(scheduler.config, num_tokens)
    scheduler.set_timesteps(num_steps, **options)
    sigmas = scheduler.sigmas.double().tolist()
    steps = [
        Step(
            timestep=timestep,
            level=(1.0 - sigmas[index], sigmas[index]),
            from_latents=1.0,
            from_output=-sigmas[index],
            keep=1.0,
            toward=0.0,
            direct=sigmas[index + 1] - sigmas[index],
        )
        for index, timestep in enumerate(scheduler.timesteps.tolist())
    ]
    return assemble(steps[first_step:], clip=float("inf"), init_noise_sigma=1.0)


def flow_shift(config: Any, num_tokens: int) -> float:
    """Return how far the schedule is shifted towards noise: linear in the tokens of the image."""
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    return float(num_tokens * slope + config.base_shift - slope * config.base_image_seq_len)
