"""One sampler step for a whole batch in which every row has its own sampler, step and schedule.

Every first-order and two-step sampler that the engine offers is linear in the same quantities, so
a row of eight coefficients says which sampler it is and where in its schedule it stands::

    denoised = clamp(from_latents * x + from_output * m, -clip, clip)
    next     = keep * x + direct * m + toward * denoised + history * previous + noise * z
"""

from __future__ import annotations

import torch
from torch import Tensor

from ray_cluster.kernels.matrices import accumulator

FROM_LATENTS, FROM_OUTPUT, KEEP, DIRECT, TOWARD, HISTORY, NOISE, CLIP = range(8)
NUM_COEFFICIENTS = 8


def sampler_update(
    latents: Tensor,
    output: Tensor,
    previous: Tensor,
    noise: Tensor | None,
    coefficients: Tensor,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance every row by its own sampler step.

    Rows are images, ``[B, ...]``, or with ``rows`` the pixels of all images, ``[M, C]``.

    Args:
        latents: ``[B, ...]``, the present latents x.
        output: ``[B, ...]``, the model's prediction m after guidance.
        previous: ``[B, ...]``, denoised latents of the row's previous step; zeros at the first.
        noise: ``[B, ...]``, fresh normal noise z, zeros in rows that take none; None when no
            row takes any.
        coefficients: ``[B, 8]`` in the order of the constants of this module; clip may be inf.
        rows: ``[M]`` integers, the row of ``coefficients`` for each of M rows of the other
            tensors. Without it they have as many rows as ``coefficients``.

    Returns:
        The next latents and the denoised estimate, shape and dtype those of ``latents``.

    Raises:
        ValueError: shapes do not fit.
    """
    check_update(latents, (output, previous, noise), coefficients, rows)
    if rows is not None:
        coefficients = coefficients.index_select(0, rows)
    shape = (len(latents), NUM_COEFFICIENTS, *([1] * (latents.ndim - 1)))
    # halves are advanced in fp32: a schedule's coefficients lose too much as halves
    column = coefficients.to(accumulator(latents.dtype)).reshape(shape).unbind(1)
    denoised = column[FROM_LATENTS] * latents + column[FROM_OUTPUT] * output
    denoised = torch.clamp(denoised, -column[CLIP], column[CLIP])
    advanced = column[KEEP] * latents + column[TOWARD] * denoised
    advanced += column[DIRECT] * output
    advanced += column[HISTORY] * previous
    if noise is not None:
        advanced += column[NOISE] * noise
    return advanced.to(latents.dtype), denoised.to(latents.dtype)


def check_update(
    latents: Tensor,
    others: tuple[Tensor | None, ...],
    coefficients: Tensor,
    rows: Tensor | None,
) -> None:
    """Refuse tensors of another shape than the latents, and rows without coefficients."""
    shapes = [tuple(one.shape) for one in others if one is not None]
    if any(shape != latents.shape for shape in shapes):
        raise ValueError(
            f"all tensors must have the latents' shape {tuple(latents.shape)}, given {shapes}"
        )
    owners = coefficients if rows is None else rows
    shape = tuple(coefficients.shape)
    if shape[1:] != (NUM_COEFFICIENTS,) or len(owners) != len(latents):
        raise ValueError(
            f"{len(latents)} rows need as many rows of coefficients, [B, {NUM_COEFFICIENTS}], or "
            f"numbers of such rows: given {shape}, and rows: "
            f"{None if rows is None else tuple(rows.shape)}"
        )
