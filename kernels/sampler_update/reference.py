"""One sampler step for a whole batch in which every row has its own sampler, step and schedule.

Every first-order and two-step sampler that the engine offers is linear in the same quantities, so
a row of eight coefficients says which sampler it is and where in its schedule it stands::

    denoised = clamp(from_latents * x + from_output * m, -clip, clip)
    next     = keep * x + direct * m + toward * denoised + history * previous + noise * z
"""

from __future__ import annotations

import torch
from torch import Tensor

FROM_LATENTS, FROM_OUTPUT, KEEP, DIRECT, TOWARD, HISTORY, NOISE, CLIP = range(8)
NUM_COEFFICIENTS = 8


def sampler_update(
    latents: Tensor,
    output: Tensor,
    previous: Tensor,
    noise: Tensor | None,
    coefficients: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advance every row by its own sampler step.

    Args:
        latents: ``[B, ...]``, the present latents x.
        output: ``[B, ...]``, the model's prediction m after guidance.
        previous: ``[B, ...]``, denoised latents of the row's previous step; zeros at the first.
        noise: ``[B, ...]``, fresh normal noise z, zeros in rows that take none; None when no
            row takes any.
        coefficients: ``[B, 8]`` in the order of the constants of this module; clip may be inf.

    Returns:
        The next latents and the denoised estimate, both ``[B, ...]`` in the dtype of ``latents``.
    """
    shape = (len(latents), NUM_COEFFICIENTS, *([1] * (latents.ndim - 1)))
    column = coefficients.to(latents.dtype).reshape(shape).unbind(1)
    denoised = column[FROM_LATENTS] * latents + column[FROM_OUTPUT] * output
    denoised = torch.clamp(denoised, -column[CLIP], column[CLIP])
    advanced = column[KEEP] * latents + column[TOWARD] * denoised
    advanced += column[DIRECT] * output
    advanced += column[HISTORY] * previous
    if noise is not None:
        advanced += column[NOISE] * noise
    return advanced, denoised
