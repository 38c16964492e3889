"""What requests still take, in units that are no replica's, so that sums of it can be kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.previews import previews_left
from ray_cluster.policies.types import RequestView, StepCost

Amounts = npt.NDArray[np.float64]
"""[5, ...]: the fields of :class:`Load`, in their order."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work of requests, added up in whole numbers: what was added can be taken away again.

    Attributes:
        num_requests: how many there are.
        steps: denoising steps.
        step_pixels: image pixels of all model rows, over all steps.
        step_squares: the squares of each model row's image pixels, over all steps.
        decode_pixels: image pixels to decode, of images and previews.
    """

    num_requests: int = 0
    steps: int = 0
    step_pixels: int = 0
    step_squares: int = 0
    decode_pixels: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.num_requests + other.num_requests,
            self.steps + other.steps,
            self.step_pixels + other.step_pixels,
            self.step_squares + other.step_squares,
            self.decode_pixels + other.decode_pixels,
        )

    def __sub__(self, other: Load) -> Load:
        return Load(
            self.num_requests - other.num_requests,
            self.steps - other.steps,
            self.step_pixels - other.step_pixels,
            self.step_squares - other.step_squares,
            self.decode_pixels - other.decode_pixels,
        )


NO_LOAD = Load()


def load_of(request: RequestView) -> Load:
    """Return what is left to do of a request."""
    pixels, steps = request.width_px * request.height_px, request.remaining_steps
    num_decodes = 1
    if request.num_previews:
        num_decodes += previews_left(request.num_steps, request.num_previews, request.steps_done)
    step_pixels = steps * pixels * request.rows_per_step
    return Load(
        num_requests=1,
        steps=steps,
        step_pixels=step_pixels,
        step_squares=step_pixels * pixels,
        decode_pixels=num_decodes * pixels,
    )


def load_s(cost: StepCost, load: Load) -> float:
    """Return the seconds that a load takes if no step is shared, each with its fixed part.

    With the cost that one request has in a full batch (:func:`share_cost`), or in a pool
    (:func:`pool_of`), it is the time in which a busy replica, or pool, works the load off.
    """
    return (
        cost.fixed_s * load.steps
        + cost.per_megapixel_s * load.step_pixels / 1e6
        + cost.per_squared_megapixel_s * load.step_squares / 1e12
        + cost.decode_per_megapixel_s * load.decode_pixels / 1e6
    )


def amounts_of(load: Load) -> Amounts:
    """Return a load as an array, [5]."""
    return np.array(
        (
            load.num_requests,
            load.steps,
            load.step_pixels,
            load.step_squares,
            load.decode_pixels,
        ),
        dtype=float,
    )


def prices_s(cost: StepCost) -> Amounts:
    """Return the seconds of one of each amount, [5]: ``prices @ amounts`` is :func:`load_s`."""
    return np.array(
        (
            0.0,
            cost.fixed_s,
            cost.per_megapixel_s / 1e6,
            cost.per_squared_megapixel_s / 1e12,
            cost.decode_per_megapixel_s / 1e6,
        )
    )
