"""Whether a group, once admitted, would be late or make others late, and what preemption changes.

Small cells are simulated step by step (:mod:`ray_cluster.policies.admission.forecast`), larger ones
as a fluid (:mod:`ray_cluster.policies.admission.fluid`). Predictions are multiplied by a safety
factor that follows their recent errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ray_cluster.policies.admission.fluid import PoolView, QueueEnds, ends_s
from ray_cluster.policies.admission.forecast import (
    ForecastView,
    forecast_s,
    forecasts_within_budget,
)
from ray_cluster.policies.admission.load import Amounts, Floats, amounts_of, load_of
from ray_cluster.policies.admission.preemption import Exchange, exchanges
from ray_cluster.policies.admission.queue_view import QueueView
from ray_cluster.policies.leasing.ordering import queue_key
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
        ends_s: seconds until the last of the group is done, if nobody else arrives.
        exchange: the preemption that this takes; None if none is needed.
    """

    late_s: float
    is_simulated: bool
    ends_s: float
    exchange: Exchange | None = None


class Forecasts:
    """The forecasts of one decision: their number is bounded by what they cost, so that no group,
    whatever it asks for, takes long to decide over.

    Attributes:
        num_left: how many more there may be; infinite while nothing was simulated.
    """

    def __init__(self) -> None:
        self.num_left = math.inf
        self._before_s: Mapping[str, float] | None = None

    def of(self, view: ForecastView, wanted: Sequence[RequestView] = ()) -> Mapping[str, float]:
        """Return when requests end; see :func:`.forecast.forecast_s`."""
        num_placed = len(view.queue) if any(one.needs for one in view.queue) else 0
        num = forecasts_within_budget(len(view.requests), num_placed, view.replicas)
        self.num_left = min(self.num_left, num) - 1
        return forecast_s(view, wanted)

    def without_group(self, view: ForecastView) -> Mapping[str, float]:
        """Return when those who are there end; found out once.

        Args:
            view: the cell without the group; the same one at every call.
        """
        if self._before_s is None:
            self._before_s = self.of(view)
        return self._before_s


def outlook_of(group: Sequence[RequestView], queue: QueueView, forecasts: Forecasts) -> Outlook:
    """Return what admitting a group of one model now would lead to.

    Where the fluid predicts, at least one of the group must have a deadline.

    Args:
        forecasts: shared by calls for the same group with other steps.
    """
    now_s = group[0].arrival_s
    view = queue.forecast_view(group, now_s)
    if view is not None:
        return _simulated_outlook(group, view, queue, forecasts)
    slacks_s = np.array([one.deadline_s - now_s for one in group])
    counts = np.array([has_deadline(one) for one in group])
    safety = queue.safety_factor(group[0].model, now_s, is_simulated=False)
    ends_s = ends_of_group_s(group, queue)
    own_s = safety * ends_s[counts] - slacks_s[counts]
    lates_s = np.concatenate([own_s, _made_late_s(group, queue, safety)])
    return Outlook(float(lates_s.max()), is_simulated=False, ends_s=float(ends_s.max()))


def _simulated_outlook(
    group: Sequence[RequestView], view: ForecastView, queue: QueueView, forecasts: Forecasts
) -> Outlook:
    """The outlook of a cell that can be simulated; later arrivals can be refused, so none count."""
    safety = _simulated_safety_factor(group, queue)
    present = replace(view, later=())
    lateness = _GroupLateness(group, present, safety, forecasts)
    late_s = lateness.late_s(present)
    ends_s = lateness.ends_s
    if late_s > 0 and queue.has_preemption:
        for exchange in exchanges(group, present):
            if forecasts.num_left < 1:
                break
            if lateness.late_s(exchange.view) <= 0:
                # later arrivals count for the prediction
                after = replace(exchange.view, later=view.later)
                return Outlook(0.0, True, lateness.ends_s, replace(exchange, view=after))
    return Outlook(late_s, True, ends_s)


class _GroupLateness:
    """How late a group is, or makes others.

    Args:
        view: the cell with the group in its queue.
        safety: factor for predictions.

    Attributes:
        ends_s: when the last of the group was done, in the view that was asked about last.
    """

    def __init__(
        self,
        group: Sequence[RequestView],
        view: ForecastView,
        safety: float,
        forecasts: Forecasts,
    ) -> None:
        self._safety = safety
        self._forecasts = forecasts
        self.ends_s = 0.0
        self._own = {one.request_id for one in group}
        # a group without deadlines is asked about for its own sake
        self._due = [one.request_id for one in group if has_deadline(one)] or list(self._own)
        self._without_group = replace(
            view, queue=[one for one in view.queue if one.request_id not in self._own]
        )

    def late_s(self, view: ForecastView) -> float:
        """Most seconds by which the group is late, or another that was in time without it."""
        ends_s = self._forecasts.of(view)
        self.ends_s = max(ends_s[one] for one in self._own)
        late_by_id = self._lates_of(view, ends_s)
        found_s = max(late_by_id[one] for one in self._due)
        for one, late_s in late_by_id.items():
            if late_s > found_s and late_s > 0 and one not in self._own and self._before[one] <= 0:
                found_s = late_s
        return found_s

    @cached_property
    def _before(self) -> Mapping[str, float]:
        view = self._without_group
        return self._lates_of(view, self._forecasts.without_group(view))

    def _lates_of(self, view: ForecastView, ends_s: Mapping[str, float]) -> dict[str, float]:
        """Seconds by which each request is late, negative for those in time."""
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
    return _ends_behind_s(group, last, amounts_of(queue.ahead_of(last)), queue.pool(last.model))


def least_slo_s(group: Sequence[RequestView], queue: QueueView) -> float | None:
    """Return the seconds that even an idle service needs for a group, if it is never in time.

    What was observed beside other load says nothing of an idle service. So it is late for certain
    only by the lowest costs known of its replicas, without time outside of steps, and without a
    safety factor above 1. The seconds are those that make sure of it: with what is observed of
    stages and the safety factor, and still by the lowest costs.

    Returns:
        None if everybody with a deadline might be in time.
    """
    now_s, model = group[0].arrival_s, group[0].model
    view = queue.forecast_view(group, now_s)
    if view is None:
        pool = queue.best_pool(model)
        last = max(group, key=queue_key)
        least_s = _ends_behind_s(group, last, np.zeros_like(amounts_of(load_of(last))), pool)
        safety = queue.safety_factor(model, now_s, is_simulated=False)
        sure_s, least_s = safety * least_s, min(1.0, safety) * least_s
    else:
        idle = _idle_at_best(view, group)
        least = min(1.0, queue.safety_factor(model, now_s, is_simulated=True))
        least_s = least * _simulated_ends_s(group, replace(idle, encode_s=0.0, rest_s=0.0))
        sure_s = _simulated_safety_factor(group, queue) * _simulated_ends_s(group, idle)
    slacks_s = np.array([one.deadline_s - one.arrival_s for one in group])
    counts = np.array([has_deadline(one) for one in group])
    is_late = (least_s > slacks_s) & counts
    return float(sure_s[counts].max()) if is_late.any() else None


def _idle_at_best(view: ForecastView, group: Sequence[RequestView]) -> ForecastView:
    """The same replicas with nothing but the group to do, and as fast as is known of each."""
    return replace(
        view,
        replicas=[
            replace(one, cost=one.best_cost or one.cost, reported_s=0.0, held=(), leased=())
            for one in view.replicas
        ],
        queue=sorted(group, key=queue_key),
        later=(),
    )


def _simulated_ends_s(group: Sequence[RequestView], view: ForecastView) -> Floats:
    end_by_id = forecast_s(view)
    return np.array([end_by_id[one.request_id] for one in group])


def _simulated_safety_factor(group: Sequence[RequestView], queue: QueueView) -> float:
    seen = queue.safety_factor(group[0].model, group[0].arrival_s, is_simulated=True)
    return max(LEAST_SAFETY_FACTOR, seen)


def _ends_behind_s(
    group: Sequence[RequestView], last: RequestView, ahead: Amounts, pool: PoolView | None
) -> Floats:
    if pool is None:
        raise ValueError(f"there is no replica of {last.model} to predict from")
    own = np.array([amounts_of(load_of(one)) for one in group]).T
    if len(group) > 1:
        ahead = ahead + own.sum(axis=1) - amounts_of(load_of(last))
    return ends_s(own, ahead, pool)
