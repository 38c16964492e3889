"""What requests still take, in units that are no replica's, so that sums of it can be kept."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.types import RequestView, StepCost

Floats = npt.NDArray[np.float64]
Amounts = npt.NDArray[np.float64]
"""[L, ...]: the L fields of :class:`Load`, in their order."""


class Load(NamedTuple):
    """Work of requests in whole numbers, so that what was added can be taken away again.

    Attributes:
        steps: denoising steps.
        step_pixels: image pixels of all model rows, over all steps.
        step_squares: the squares of each model row's image pixels, over all steps.
        decode_pixels: image pixels to decode, of images and previews.
        encode_pixels: image pixels to encode, of edits.
        control_pixels: ``step_pixels``, times each request's number of ControlNets.
        control_squares: ``step_squares`` likewise.
        lora_pixels: ``step_pixels``, times each request's number of LoRAs.
        spared_pixels: those of ``step_pixels`` outside masks.
        spared_squares: each model row's spared pixels times all of its pixels, over all steps.
        passes: times that later requests may still be leased before one of these.
    """

    num_requests: int = 0
    steps: int = 0
    step_pixels: int = 0
    step_squares: int = 0
    decode_pixels: int = 0
    encode_pixels: int = 0
    control_pixels: int = 0
    control_squares: int = 0
    lora_pixels: int = 0
    spared_pixels: int = 0
    spared_squares: int = 0
    passes: int = 0

    @property
    def is_plain(self) -> bool:
        return not any(self[NUM_PLAIN:])

    def plus(self, other: Load) -> Load:
        return Load(*map(add, self, other))

    def minus(self, other: Load) -> Load:
        return Load(*map(sub, self, other))


NO_LOAD = Load()
NUM_AMOUNTS = len(NO_LOAD)
# the first ones do not come from add-ons and masks
NUM_PLAIN = 6
# rows of amounts
REQUESTS, PIXELS, SQUARES, PASSES = 0, 2, 3, NUM_AMOUNTS - 1


def load_of(request: RequestView) -> Load:
    """Return what is left to do of a request."""
    pixels, steps = request.row_px, request.remaining_steps
    num_decodes = 1 + request.previews_left
    step_pixels = round(steps * pixels * request.rows_per_step * request.step_share)
    plain = Load(
        num_requests=1,
        steps=steps,
        step_pixels=step_pixels,
        step_squares=step_pixels * pixels,
        decode_pixels=num_decodes * request.width_px * request.height_px,
        encode_pixels=request.encoded_pixels,
    )
    if not request.has_extras:
        return plain
    num_controls = len(request.controls)
    spared_pixels = steps * request.spared_pixels * request.rows_per_step
    return plain._replace(
        control_pixels=num_controls * step_pixels,
        control_squares=num_controls * step_pixels * pixels,
        lora_pixels=len(request.loras) * step_pixels,
        spared_pixels=spared_pixels,
        spared_squares=spared_pixels * pixels,
        passes=request.passes_left,
    )


def total_load(requests: Iterable[RequestView]) -> Load:
    """Return what is left to do of several requests."""
    loads = [load_of(one) for one in requests]
    return Load(*map(sum, zip(*loads, strict=True))) if loads else NO_LOAD


def load_s(cost: StepCost, load: Load) -> float:
    """Return the seconds that a load takes if no step is shared, each with its fixed part.

    With the cost of one request in a full batch
    (:func:`ray_cluster.policies.costs.cost_model.share_cost` or
    :attr:`ray_cluster.policies.admission.fluid.PoolView.shared_cost`) it is the time in which a
    busy replica, or pool, works the load off.
    """
    pixels = (
        load.step_pixels
        + cost.control_share * load.control_pixels
        + cost.lora_share * load.lora_pixels
        - cost.spared_share * load.spared_pixels
    )
    squares = (
        load.step_squares
        + cost.control_share * load.control_squares
        - cost.spared_share * load.spared_squares
    )
    return (
        cost.fixed_s * load.steps
        + cost.per_megapixel_s * pixels / 1e6
        + cost.per_squared_megapixel_s * squares / 1e12
        + cost.decode_per_megapixel_s * load.decode_pixels / 1e6
        + cost.encode_per_megapixel_s * load.encode_pixels / 1e6
    )


def amounts_of(load: Load) -> Amounts:
    """Return a load as an array, [L]."""
    return np.array(load, dtype=float)


def prices_s(cost: StepCost) -> Amounts:
    """Return the seconds of one of each amount, [L]: ``prices @ amounts`` is :func:`load_s`.

    Of a cost that prices neither add-ons nor masks it is only the plain amounts, [6].
    """
    pixel_s, square_s = cost.per_megapixel_s / 1e6, cost.per_squared_megapixel_s / 1e12
    coding_s = (cost.decode_per_megapixel_s / 1e6, cost.encode_per_megapixel_s / 1e6)
    plain_s = (0.0, cost.fixed_s, pixel_s, square_s, *coding_s)
    if not cost.prices_extras:
        return np.array(plain_s)
    control, lora, spared = cost.control_share, cost.lora_share, cost.spared_share
    controls_s = (control * pixel_s, control * square_s)
    spared_s = (-spared * pixel_s, -spared * square_s)
    return np.array((*plain_s, *controls_s, lora * pixel_s, *spared_s, 0.0))


def priced_s(prices: Amounts, amounts: Amounts) -> Floats:
    """Return the seconds of amounts, [...]; those of plain ones do not depend on other prices.

    Args:
        prices: as :func:`prices_s` has them.
        amounts: [L, ...].
    """
    # a longer sum may differ in its last digit
    plain_s: Floats = prices[:NUM_PLAIN] @ amounts[:NUM_PLAIN]
    if len(prices) == NUM_PLAIN:
        return plain_s
    return plain_s + prices[NUM_PLAIN:] @ amounts[NUM_PLAIN:]


def row_pixels(cost: StepCost, amounts: Amounts) -> tuple[Floats, Floats]:
    """Return the pixels and squares of plain model rows that cost as much, [...] each."""
    pixels, squares = amounts[PIXELS], amounts[SQUARES]
    if not cost.prices_extras:
        return pixels, squares
    control, lora, spared = cost.control_share, cost.lora_share, cost.spared_share
    more, more_squares, lora_pixels, less, less_squares, _ = amounts[NUM_PLAIN:]
    return (
        pixels + control * more + lora * lora_pixels - spared * less,
        squares + control * more_squares - spared * less_squares,
    )
