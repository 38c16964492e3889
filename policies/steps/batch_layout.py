"""Whether the sizes of a batch share one model call, or take one call each."""

from __future__ import annotations

from typing import Literal

from ray_cluster.policies.types import StepCost

BatchLayout = Literal["mixed", "grouped"]

# of so many steps the first ones share a call whatever its expected cost; the first of them also
# pays for what is made once per shape
TRIAL_EVERY, TRIAL_STEPS = 16, 2


def choose_layout(num_sizes: int, cost: StepCost, *, step: int | None = None) -> BatchLayout:
    """Return the layout of a step that is expected to take less time.

    One call for all sizes costs ``fixed_s`` once and ``per_further_size_s`` for every size but the
    first; a call for each size costs ``fixed_s`` every time. The pixels cost the same either way.

    Args:
        num_sizes: different sizes in the batch.
        step: its number, if the cost is fitted to steps chosen here: the price of a further size
            shows in shared calls only, so some are tried even if it seems dear.
    """
    is_trial = step is not None and step % TRIAL_EVERY < TRIAL_STEPS
    if is_trial or num_sizes == 1 or cost.per_further_size_s <= cost.fixed_s:
        return "mixed"
    return "grouped"
