"""What a step costs on this device: measured once, then estimated from every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ray_cluster.policies.cost_learning import (
    StepHistory,
    clipped_s,
    fitted_work,
    observe_step,
    refitted_cost,
)
from ray_cluster.policies.cost_model import (
    CostResidual,
    StepWork,
    TimedStep,
    corrected,
    faded,
    observe,
    step_s,
)
from ray_cluster.policies.types import StepCost

# of no model in particular: a replica measures its own first
_UNMEASURED = StepCost(fixed_s=0.01, per_megapixel_s=1.0, source="modelled")
# steps between two fits of the terms; the overall factor is updated at each
_EVERY = 4
# shapes of steps, the latest ones, whose kernels and indices are assumed to exist still
_KEPT = 256
# seconds of silence that make a difference: between them, an idle replica's cost stays the same
_SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class _LastStep:
    ended_s: float = 0.0
    seconds: float = 0.0


class StepCosts:
    """Estimates the cost of a step. The step thread observes; any thread may read.

    Args:
        measured: as it was found before the first request. An idle engine's estimate goes back to
            its level, in minutes: nothing is known by then of other load on the machine.
        clock: monotonic seconds; without one, no time passes between steps.
    """

    def __init__(
        self, measured: StepCost = _UNMEASURED, clock: Callable[[], float] | None = None
    ) -> None:
        self._measured = self._fitted = measured
        self._clock = clock
        self._last = _LastStep()
        self._history = StepHistory()
        self._residual = CostResidual()
        self._num_fitted = 0
        self._sorts: OrderedDict[tuple[int, ...], None] = OrderedDict()

    @property
    def current(self) -> StepCost:
        """What a step costs at present."""
        return corrected(self._fitted, self._faded())

    def _faded(self, step_s: float = 0.0) -> CostResidual:
        """Return the residual as it is after the present silence, less the step that ends it."""
        silent_s = 0.0 if self._clock is None else self._clock() - step_s - self._last.ended_s
        if silent_s < _SILENCE_S:
            return self._residual
        silent_s -= silent_s % _SILENCE_S
        return faded(self._residual, silent_s, step_s=self._last.seconds)

    def begin(self, measured: StepCost) -> None:
        """Begin anew from a cost that was measured; before the first step."""
        self._measured = self._fitted = measured

    def observe(self, work: StepWork, duration_s: float, *, num_calls: int = 1) -> None:
        """Update the estimate with a step that took so many calls of the model.

        Terms are fitted to steps of shapes that were seen before: the first step of a shape also
        makes its kernels and indices.
        """
        self._residual = observe(
            self._faded(duration_s),
            predicted_s=step_s(self._fitted, work),
            observed_s=duration_s,
        )
        if self._clock is not None:
            self._last = _LastStep(self._clock(), duration_s)
        fitted = fitted_work(self._measured, work)
        if self._is_first(fitted, num_calls):
            return
        step = TimedStep(fitted, clipped_s(duration_s, step_s(self.current, work)))
        self._history = observe_step(self._history, step, self._fitted, num_calls=num_calls)
        self._num_fitted += 1
        if self._num_fitted % _EVERY == 0:
            self._fitted = refitted_cost(self._measured, self._history)

    def _is_first(self, work: StepWork, num_calls: int) -> bool:
        # in whole pixels: sums in another order differ in their last digit
        pixels, squares = round(work.megapixels * 1e6), round(work.squared_megapixels * 1e12)
        controlled = 0 if work.extra is None else round(work.extra.control_megapixels * 1e6)
        sort = (pixels, squares, work.num_sizes, num_calls, controlled)
        is_first = sort not in self._sorts
        self._sorts[sort] = None
        self._sorts.move_to_end(sort)
        if len(self._sorts) > _KEPT:
            self._sorts.popitem(last=False)
        return is_first
