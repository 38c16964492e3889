"""Whether the sizes of a batch share one model call, or take one call each."""

from __future__ import annotations

from typing import Literal

from ray_cluster.policies.types import StepCost

BatchLayout = Literal["mixed", "grouped"]


def choose_layout(num_sizes: int, cost: StepCost) -> BatchLayout:
    """Return the layout of a step that is expected to take less time.

    One call for all sizes costs ``fixed_s`` once and ``per_further_size_s`` for every size but the
    first; a call for each size costs ``fixed_s`` every time. The pixels cost the same either way.

    Args:
        num_sizes: different sizes in the batch.
        cost: of a step, as it was measured.
    """
    if num_sizes == 1 or cost.per_further_size_s <= cost.fixed_s:
        return "mixed"
    return "grouped"
