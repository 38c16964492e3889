"""How long an image takes: seconds of a step, of a request alone, and of its share of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

from ray_cluster.policies.types import RequestView, StepCost

# one observation moves the correction by at most this factor, up or down
MAX_SURPRISE = 4.0
# observations that the correction averages
RESIDUAL_WINDOW = 16
# silence after which what was observed before counts half
HALF_LIFE_S = 60.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one denoising step of a batch computes.

    Attributes:
        megapixels: image pixels of all model rows, in millions.
        squared_megapixels: sum of the squares of each model row's megapixels.
        extra: what add-ons add to that, and masks save of it.
    """

    megapixels: float
    squared_megapixels: float
    num_sizes: int = 1
    extra: ExtraWork | None = None


class ExtraWork(NamedTuple):
    """What add-ons and masks do to the work of model rows, to be priced by a cost's shares.

    Attributes:
        control_megapixels: of each row, times its number of ControlNets.
        control_squared_megapixels: their squares likewise.
        lora_megapixels: of each row, times its number of LoRAs.
        spared_megapixels: outside the rows' masks.
        spared_squared_megapixels: each row's spared megapixels times all of its megapixels: the
            queries of a masked row meet all keys.
    """

    control_megapixels: float = 0.0
    control_squared_megapixels: float = 0.0
    lora_megapixels: float = 0.0
    spared_megapixels: float = 0.0
    spared_squared_megapixels: float = 0.0

    def plus(self, other: ExtraWork) -> ExtraWork:
        return ExtraWork(*map(add, self, other))

    def megapixels(self, cost: StepCost) -> float:
        """Return the megapixels of plain rows of equal cost."""
        return (
            cost.control_share * self.control_megapixels
            + cost.lora_share * self.lora_megapixels
            - cost.spared_share * self.spared_megapixels
        )

    def squared_megapixels(self, cost: StepCost) -> float:
        """Return the squared megapixels of plain rows of equal cost."""
        return (
            cost.control_share * self.control_squared_megapixels
            - cost.spared_share * self.spared_squared_megapixels
        )


def work_of(requests: Iterable[RequestView]) -> StepWork:
    """Return the work of one step of these requests together."""
    megapixels = squared = 0.0
    sizes: set[tuple[int, int]] = set()
    extra: ExtraWork | None = None
    for request in requests:
        megapixels += row_megapixels(request)
        squared += row_squared_megapixels(request)
        sizes.add(request.size_px)
        if request.has_extras and (own := extra_of(request)) is not None:
            extra = own if extra is None else extra.plus(own)
    return StepWork(megapixels, squared, len(sizes), extra)


def extra_of(request: RequestView) -> ExtraWork | None:
    """Return what add-ons and a mask do to one step of a request; None if it has none."""
    num_controls, num_loras = len(request.controls), len(request.loras)
    spared = request.spared_pixels * request.rows_per_step / 1e6
    if not (num_controls or num_loras or spared):
        return None
    megapixels, squared = row_megapixels(request), row_squared_megapixels(request)
    return ExtraWork(
        num_controls * megapixels,
        num_controls * squared,
        num_loras * megapixels,
        spared,
        spared * request.row_px / 1e6,
    )


def row_megapixels(request: RequestView) -> float:
    """Return the megapixels of whole model rows that a step of the request costs as much as."""
    return request.row_px * request.rows_per_step * request.step_share / 1e6


def row_squared_megapixels(request: RequestView) -> float:
    """Return the sum of squared megapixels over the request's model rows."""
    each = (request.row_px / 1e6) ** 2
    return each * request.rows_per_step * request.step_share


def plain_work(cost: StepCost, work: StepWork) -> StepWork:
    """Return the work without add-ons and masks that costs as much."""
    if work.extra is None:
        return work
    return StepWork(
        work.megapixels + work.extra.megapixels(cost),
        work.squared_megapixels + work.extra.squared_megapixels(cost),
        work.num_sizes,
    )


def step_s(cost: StepCost, work: StepWork) -> float:
    """Return the seconds of one denoising step, with the batch in the faster layout."""
    further_size_s = min(cost.per_further_size_s, cost.fixed_s)
    work = plain_work(cost, work)
    return (
        cost.fixed_s
        + cost.per_megapixel_s * work.megapixels
        + cost.per_squared_megapixel_s * work.squared_megapixels
        + further_size_s * max(0, work.num_sizes - 1)
    )


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A measured denoising step: one model call, whatever sizes are in it."""

    work: StepWork
    seconds: float


def one_call_s(cost: StepCost, work: StepWork) -> float:
    """Return the seconds of one denoising step whose sizes share one model call."""
    alike_s = step_s(cost, replace(work, num_sizes=1))
    return alike_s + cost.per_further_size_s * (work.num_sizes - 1)


def further_size_s(cost: StepCost, steps: Iterable[TimedStep]) -> float:
    """Return the seconds of a further size that fit the steps best, given a cost's other terms.

    Least squares of the relative errors, not negative; 0 where no step has several sizes.
    """
    plain = replace(cost, per_further_size_s=0.0)
    explained = squares = 0.0
    for step in steps:
        num_further = step.work.num_sizes - 1
        missing_s = step.seconds - one_call_s(plain, step.work)
        explained += num_further * missing_s / step.seconds**2
        squares += (num_further / step.seconds) ** 2
    return max(0.0, explained / squares) if squares else 0.0


def lora_share(cost: StepCost, steps: Iterable[TimedStep]) -> float:
    """Return the share that LoRAs add to a row's pixels that fits the steps best.

    Least squares of the relative errors, given a cost's other terms; not negative.
    """
    return _fitted_share(replace(cost, lora_share=0.0), replace(cost, lora_share=1.0), steps)


def control_share(cost: StepCost, steps: Iterable[TimedStep]) -> float:
    """Return the share that ControlNets add to a row's work that fits the steps best.

    As :func:`lora_share` does it.
    """
    return _fitted_share(replace(cost, control_share=0.0), replace(cost, control_share=1.0), steps)


def _fitted_share(without: StepCost, whole: StepCost, steps: Iterable[TimedStep]) -> float:
    """Return the share, from costs in which it is 0 and 1."""
    explained = squares = 0.0
    for step in steps:
        assert step.work.extra is not None, "a step without add-ons says nothing of them"
        plain_s = one_call_s(without, step.work)
        whole_s = one_call_s(whole, step.work) - plain_s
        explained += whole_s * (step.seconds - plain_s) / step.seconds**2
        squares += (whole_s / step.seconds) ** 2
    return max(0.0, explained / squares) if squares else 0.0


def fitted_cost(
    size_px: tuple[int, int],
    *,
    alone_s: float,
    together_s: float,
    num_together: int,
    beside: tuple[tuple[int, int], float] | None = None,
) -> StepCost:
    """Return the cost of a step through a few measured ones, all without guidance.

    Args:
        size_px: of the images.
        alone_s: seconds of a step of one of them.
        together_s: seconds of a step of ``num_together`` of them, at least two.
        beside: another size, and the seconds of a step of one image of each.
    """
    megapixels = size_px[0] * size_px[1] / 1e6
    per_row_s = max(0.0, (together_s - alone_s) / (num_together - 1))
    cost = StepCost(
        fixed_s=max(0.0, alone_s - per_row_s),
        per_megapixel_s=max(per_row_s, 0.01 * alone_s) / megapixels,
        source="measured",
    )
    if beside is None:
        return cost
    (width_px, height_px), pair_s = beside
    # a cost of two terms has no use for squares
    pair = StepWork(megapixels + width_px * height_px / 1e6, 0.0, num_sizes=2)
    further_s = further_size_s(cost, [TimedStep(pair, pair_s)])
    return replace(cost, per_further_size_s=further_s)


def own_s(cost: StepCost, request: RequestView) -> float:
    """Return the seconds that a request adds to a denoising step."""
    megapixels = request.row_px / 1e6
    each_s = cost.per_megapixel_s + cost.per_squared_megapixel_s * megapixels
    plain_s = each_s * megapixels * request.rows_per_step * request.step_share
    extra = extra_of(request) if request.has_extras else None
    if extra is None:
        return plain_s
    return (
        plain_s
        + cost.per_megapixel_s * extra.megapixels(cost)
        + cost.per_squared_megapixel_s * extra.squared_megapixels(cost)
    )


def decode_s(cost: StepCost, request: RequestView) -> float:
    """Return the seconds of decoding a request's image."""
    return cost.decode_per_megapixel_s * request.width_px * request.height_px / 1e6


def encode_s(cost: StepCost, request: RequestView) -> float:
    """Return the seconds of encoding an edit's image, if that is still to be done."""
    return cost.encode_per_megapixel_s * request.encoded_pixels / 1e6


def alone_s(cost: StepCost, request: RequestView) -> float:
    """Return the seconds that a request still takes on an idle replica, coding included."""
    each_s = cost.fixed_s + own_s(cost, request)
    steps_s = request.remaining_steps * each_s
    return encode_s(cost, request) + steps_s + decode_s(cost, request)


def share_cost(cost: StepCost, max_batch: int) -> StepCost:
    """Return one request's part of the cost of a step of a full batch."""
    return replace(cost, fixed_s=cost.fixed_s / max_batch)


def differs(cost: StepCost, other: StepCost, *, by: float) -> bool:
    """Whether any term of a cost is more than that share of it away from the other's."""
    pairs = (
        (cost.fixed_s, other.fixed_s),
        (cost.per_megapixel_s, other.per_megapixel_s),
        (cost.per_squared_megapixel_s, other.per_squared_megapixel_s),
        (cost.per_further_size_s, other.per_further_size_s),
        (cost.decode_per_megapixel_s, other.decode_per_megapixel_s),
        (cost.encode_per_megapixel_s, other.encode_per_megapixel_s),
        (cost.control_share, other.control_share),
        (cost.lora_share, other.lora_share),
        (cost.spared_share, other.spared_share),
    )
    return any(abs(mine - theirs) > by * mine for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class CostResidual:
    """A running correction of a cost model: a factor, stored as a logarithm.

    Attributes:
        log_factor: smoothed logarithm of observed over predicted seconds.
    """

    log_factor: float = 0.0
    num_observed: int = 0

    @property
    def factor(self) -> float:
        """Observed over predicted seconds."""
        return math.exp(self.log_factor)


def observe(residual: CostResidual, *, predicted_s: float, observed_s: float) -> CostResidual:
    """Return the residual after one more observation.

    The first ``RESIDUAL_WINDOW`` observations are averaged, earlier ones then fade exponentially.
    One observation counts as at most ``MAX_SURPRISE`` times off, so that a stall cannot spoil the
    model. Durations that are not positive are ignored.

    Args:
        predicted_s: by the uncorrected cost.
    """
    if predicted_s <= 0 or observed_s <= 0:
        return residual
    limit = math.log(MAX_SURPRISE)
    seen = min(limit, max(-limit, math.log(observed_s) - math.log(predicted_s)))
    weight = 1 / min(residual.num_observed + 1, RESIDUAL_WINDOW)
    return CostResidual(
        log_factor=residual.log_factor + weight * (seen - residual.log_factor),
        num_observed=residual.num_observed + 1,
    )


def share_after(silent_s: float, *, half_life_s: float = HALF_LIFE_S) -> float:
    """Return the weight that observations keep after a time without any.

    Args:
        half_life_s: of a slow process; at least ``HALF_LIFE_S`` count.
    """
    return float(0.5 ** (max(0.0, silent_s) / max(HALF_LIFE_S, half_life_s)))


def faded(residual: CostResidual, silent_s: float, *, step_s: float) -> CostResidual:
    """Return what a residual still says after a time without an observation.

    Args:
        silent_s: seconds since the last one.
        step_s: seconds that it took.
    """
    share = share_after(silent_s, half_life_s=RESIDUAL_WINDOW * step_s)
    num_observed = int(share * min(residual.num_observed, RESIDUAL_WINDOW))
    return CostResidual(share * residual.log_factor, num_observed)


def lesser_cost(cost: StepCost, other: StepCost) -> StepCost:
    """Return a cost with the smaller one of each term in seconds."""
    return replace(
        cost,
        fixed_s=min(cost.fixed_s, other.fixed_s),
        per_megapixel_s=min(cost.per_megapixel_s, other.per_megapixel_s),
        decode_per_megapixel_s=min(cost.decode_per_megapixel_s, other.decode_per_megapixel_s),
        encode_per_megapixel_s=min(cost.encode_per_megapixel_s, other.encode_per_megapixel_s),
        per_squared_megapixel_s=min(cost.per_squared_megapixel_s, other.per_squared_megapixel_s),
        per_further_size_s=min(cost.per_further_size_s, other.per_further_size_s),
    )


def corrected(cost: StepCost, residual: CostResidual) -> StepCost:
    """Return the cost with the residual's factor applied to all terms of a step."""
    factor = residual.factor
    return replace(
        cost,
        fixed_s=cost.fixed_s * factor,
        per_megapixel_s=cost.per_megapixel_s * factor,
        per_squared_megapixel_s=cost.per_squared_megapixel_s * factor,
        per_further_size_s=cost.per_further_size_s * factor,
    )
