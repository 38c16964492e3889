"""What a step costs on this device: measured once, then estimated from every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ray_cluster.policies.costs.cost_learning import (
    StepHistory,
    clipped_s,
    fitted_work,
    observe_step,
    refitted_cost,
)
from ray_cluster.policies.costs.cost_model import (
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
# steps over which the seconds of one are compared with those in which it computed
_STRETCH_WINDOW = 16
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
        busy_clock: seconds that the calling thread has computed; without one, nobody knows.
    """

    def __init__(
        self,
        measured: StepCost = _UNMEASURED,
        clock: Callable[[], float] | None = None,
        busy_clock: Callable[[], float] | None = None,
    ) -> None:
        self._measured = self._fitted = measured
        self._clock = clock
        self._busy_clock = busy_clock
        self._last = _LastStep()
        self._history = StepHistory()
        self._residual = CostResidual()
        # seconds of a step over those in which its thread computed
        self._stretch = 1.0
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

    def busy_s(self) -> float:
        """Return the seconds that the calling thread has computed, from some instant on; or 0."""
        return 0.0 if self._busy_clock is None else self._busy_clock()

    def begin(self, measured: StepCost) -> None:
        """Begin anew from a cost that was measured; before the first step."""
        self._measured = self._fitted = measured

    def observe(
        self,
        work: StepWork,
        duration_s: float,
        *,
        num_calls: int = 1,
        busy_s: float = 0.0,
    ) -> None:
        """Update the estimate with a step that took so many calls of the model.

        Terms are fitted to steps of shapes that were seen before: the first step of a shape also
        makes its kernels and indices.

        Args:
            busy_s: seconds in which its thread computed; 0 if nobody knows. Where processes
                share cores, large batches come when others are busy, too: by the whole seconds,
                their pixels would seem dear. So terms are fitted to these, the speed to the others.
        """
        self._residual = observe(
            self._faded(duration_s),
            predicted_s=step_s(self._fitted, work),
            observed_s=duration_s,
        )
        if self._clock is not None:
            self._last = _LastStep(self._clock(), duration_s)
        seconds = self._computed_s(work, duration_s, busy_s)
        fitted = fitted_work(self._measured, work)
        if self._is_first(fitted, num_calls):
            return
        expected_s = step_s(self.current, work) / self._stretch
        step = TimedStep(fitted, clipped_s(seconds, expected_s))
        self._history = observe_step(self._history, step, self._fitted, num_calls=num_calls)
        self._num_fitted += 1
        if self._num_fitted % _EVERY == 0:
            self._fitted = refitted_cost(self._measured, self._history)

    def _computed_s(self, work: StepWork, duration_s: float, busy_s: float) -> float:
        """Return the seconds that a step would have taken on a core of its own."""
        if busy_s <= 0:
            return duration_s / self._stretch
        if work.extra is not None and work.extra.control_megapixels:
            # it has waited for ControlNets in other processes, which is a part of its cost
            return duration_s / self._stretch
        # the clocks are read one after the other
        stretch = max(1.0, duration_s / busy_s)
        self._stretch += (stretch - self._stretch) / _STRETCH_WINDOW
        return min(busy_s, duration_s)

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
