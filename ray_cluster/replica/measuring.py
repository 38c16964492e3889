"""What a step of a model costs that other models call."""

from __future__ import annotations

from collections.abc import Callable

from ray_cluster.policies.costs.cost_model import fitted_cost
from ray_cluster.policies.types import StepCost

_REPEATS = 5


def measured_cost(
    size_px: tuple[int, int],
    step: Callable[[int], object],
    *,
    max_batch: int,
    clock: Callable[[], float],
) -> StepCost:
    """Return the cost of a step through the fastest of several, alone and in a full batch.

    What else the machine does only makes them slower.

    Args:
        step: makes one step of so many images.
    """

    def fastest_s(count: int) -> float:
        found = []
        for _ in range(1 + _REPEATS):
            began_s = clock()
            step(count)
            found.append(clock() - began_s)
        return min(found[1:])

    several = max(2, max_batch)
    return fitted_cost(
        size_px, alone_s=fastest_s(1), together_s=fastest_s(several), num_together=several
    )
