"""Whether a group, once admitted, would be late or make others late, and what preemption changes.

Small cells are simulated step by step (:mod:`ray_cluster.policies.forecast`), larger ones as a
fluid (:mod:`ray_cluster.policies.fluid`). Predictions are multiplied by a safety factor that
follows their recent errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ray_cluster.policies.fluid import QueueEnds, ends_s
from ray_cluster.policies.forecast import ForecastView, forecast_s
from ray_cluster.policies.load import Amounts, Floats, amounts_of, load_of
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.preemption import Exchange, exchanges
from ray_cluster.policies.queue_view import QueueView
from ray_cluster.policies.types import RequestView

# for simulated predictions: steps are not all alike, and progress is reported now and then
LEAST_SAFETY_FACTOR = 1.1


def has_deadline(request: RequestView) -> bool:
    """Whether lateness changes what becomes of a request: it is refused, or gets fewer steps."""
    return request.when_late == "refuse" or request.fewest_steps is not None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What admitting a group would lead to.

    Attributes:
        late_s: most seconds by which one with a deadline is late, or another is made late; 0 or
            less if nobody is.
        is_simulated: whether the prediction simulated steps; else it is a fluid's.
        exchange: the preemption that this takes; None if none is needed.
    """

    late_s: float
    is_simulated: bool
    exchange: Exchange | None = None


def outlook_of(group: Sequence[RequestView], queue: QueueView) -> Outlook:
    """Return what admitting a group of one model now would lead to.

    Where the fluid predicts, at least one of the group must have a deadline.
    """
    now_s = group[0].arrival_s
    view = queue.forecast_view(group, now_s)
    if view is not None:
        return _simulated_outlook(group, view, queue)
    slacks_s = np.array([one.deadline_s - now_s for one in group])
    counts = np.array([has_deadline(one) for one in group])
    safety = queue.safety_factor(group[0].model, is_simulated=False)
    own_s = safety * ends_of_group_s(group, queue)[counts] - slacks_s[counts]
    lates_s = np.concatenate([own_s, _made_late_s(group, queue, safety)])
    return Outlook(float(lates_s.max()), is_simulated=False)


def _simulated_outlook(
    group: Sequence[RequestView], view: ForecastView, queue: QueueView
) -> Outlook:
    """The outlook of a cell that can be simulated; later arrivals can be refused, so none count."""
    safety = _simulated_safety_factor(group[0].model, queue)
    present = replace(view, later=())
    lateness = _GroupLateness(group, present, safety)
    late_s = lateness.late_s(present)
    if late_s > 0 and queue.has_preemption:
        for exchange in exchanges(group, present):
            if lateness.late_s(exchange.view) <= 0:
                # later arrivals count for the prediction
                after = replace(exchange.view, later=view.later)
                return Outlook(0.0, True, replace(exchange, view=after))
    return Outlook(late_s, True)


class _GroupLateness:
    """How late a group is, or makes others.

    Args:
        view: the cell with the group in its queue.
        safety: factor for predictions.
    """

    def __init__(self, group: Sequence[RequestView], view: ForecastView, safety: float) -> None:
        self._safety = safety
        self._own = {one.request_id for one in group}
        # a group without deadlines is asked about for its own sake
        self._due = [one.request_id for one in group if has_deadline(one)] or list(self._own)
        self._without_group = replace(
            view, queue=[one for one in view.queue if one.request_id not in self._own]
        )

    def late_s(self, view: ForecastView) -> float:
        """Most seconds by which the group is late, or another that was in time without it."""
        late_by_id = self._lates_s(view)
        found_s = max(late_by_id[one] for one in self._due)
        for one, late_s in late_by_id.items():
            if late_s > found_s and late_s > 0 and one not in self._own and self._before[one] <= 0:
                found_s = late_s
        return found_s

    @cached_property
    def _before(self) -> Mapping[str, float]:
        return self._lates_s(self._without_group)

    def _lates_s(self, view: ForecastView) -> dict[str, float]:
        """Seconds by which each request is late, negative for those in time."""
        ends_s = forecast_s(view)
        return {
            one.request_id: self._safety * ends_s[one.request_id] - (one.deadline_s - view.now_s)
            for one in view.requests
        }


def _made_late_s(group: Sequence[RequestView], queue: QueueView, safety: float) -> Floats:
    """Lateness of requests behind a group that would be in time without it, [N]."""
    first = min(group, key=queue_key)
    behind, pool = queue.behind(first), queue.pool(first.model)
    if pool is None or not len(behind.deadlines_s):
        return np.zeros(0)
    before = amounts_of(queue.ahead_of(first))
    more = sum((amounts_of(load_of(one)) for one in group), np.zeros_like(before))
    ends, slacks_s = QueueEnds(behind.amounts, pool), behind.deadlines_s - group[0].arrival_s
    in_time = safety * ends.after(before) <= slacks_s
    found: Floats = safety * ends.after(before + more)[in_time] - slacks_s[in_time]
    return found


def ends_of_group_s(group: Sequence[RequestView], queue: QueueView) -> Floats:
    """Seconds until each of the group is done, [N], with all of them at the last one's place."""
    last = max(group, key=queue_key)
    return _ends_behind_s(group, last, amounts_of(queue.ahead_of(last)), queue)


def least_slo_s(group: Sequence[RequestView], queue: QueueView) -> float | None:
    """Return the seconds that even an idle service needs for a group, if that is too late for it.

    Predicted and multiplied by the safety factor as for the group now. So an idle service that can
    be simulated accepts the group if and only if it has this long.

    Returns:
        None if everybody with a deadline would be in time then.
    """
    ends_s = _ends_alone_s(group, queue)
    slacks_s = np.array([one.deadline_s - one.arrival_s for one in group])
    counts = np.array([has_deadline(one) for one in group])
    is_late = (ends_s > slacks_s) & counts
    return float(ends_s[counts].max()) if is_late.any() else None


def _ends_alone_s(group: Sequence[RequestView], queue: QueueView) -> Floats:
    """Seconds to the end of each of a group on an idle service, times the safety factor, [N]."""
    model = group[0].model
    view = queue.forecast_view(group, group[0].arrival_s)
    if view is None:
        last = max(group, key=queue_key)
        ends_s = _ends_behind_s(group, last, np.zeros_like(amounts_of(load_of(last))), queue)
        return queue.safety_factor(model, is_simulated=False) * ends_s
    idle = replace(
        view,
        replicas=[replace(one, reported_s=0.0, held=(), leased=()) for one in view.replicas],
        queue=sorted(group, key=queue_key),
        later=(),
    )
    end_by_id = forecast_s(idle)
    ends_s = np.array([end_by_id[one.request_id] for one in group])
    return _simulated_safety_factor(model, queue) * ends_s


def _simulated_safety_factor(model: str, queue: QueueView) -> float:
    return max(LEAST_SAFETY_FACTOR, queue.safety_factor(model, is_simulated=True))


def _ends_behind_s(
    group: Sequence[RequestView], last: RequestView, ahead: Amounts, queue: QueueView
) -> Floats:
    pool = queue.pool(last.model)
    if pool is None:
        raise ValueError(f"there is no replica of {last.model} to predict from")
    own = np.array([amounts_of(load_of(one)) for one in group]).T
    if len(group) > 1:
        ahead = ahead + own.sum(axis=1) - amounts_of(load_of(last))
    return ends_s(own, ahead, pool)
