"""How often a request's state is exported, so that a dead replica costs few steps and little time.

Exports' share of the step time is bounded; within that bound they are as frequent as possible.
"""

from __future__ import annotations

import math

# share of the step time that all exports together may take
MAX_SHARE = 0.01
# what an export takes over what its own threads' clocks show: woken threads, caches that it fills
# (the "four times as often" rows of the exports benchmark)
UNSEEN_FACTOR = 1.75


def steps_between_exports(
    row_step_s: float, export_s: float, *, max_share: float = MAX_SHARE
) -> int | None:
    """Return the fewest steps of a row between two exports of it; None for never.

    In a batch of ``n`` rows with an export of each every ``k`` steps, ``n / k`` exports per step
    stay within the share if ``n * cost / k <= max_share * step_s``, at a cost of ``UNSEEN_FACTOR *
    export_s``.

    Args:
        row_step_s: seconds of a step for each row in it (``step_s / n``).
        export_s: measured seconds of one export: in the steps' thread, and CPU time beside it.
        max_share: share of the step time that exports may take.
    """
    allowed_s = max_share * row_step_s
    if allowed_s <= 0:
        return None
    ratio = UNSEEN_FACTOR * max(0.0, export_s) / allowed_s
    return max(1, math.ceil(ratio)) if math.isfinite(ratio) else None
