"""Whether a group that is let in will be late, or make others late, and who might give way to it.

Where little is there, all of it is followed step by step (:mod:`ray_cluster.policies.forecast`);
more flows as a fluid (:mod:`ray_cluster.policies.prediction`). Predictions are stretched by how
wrong they have been of late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ray_cluster.policies.forecast import ForecastView, forecast_s
from ray_cluster.policies.load import Amounts, Floats, amounts_of, load_of
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.prediction import LineEnds, ends_s
from ray_cluster.policies.preemption import Exchange, exchanges
from ray_cluster.policies.queue_view import QueueView
from ray_cluster.policies.types import RequestView

# what predictions are at least multiplied by where everybody there was followed: steps are not all
# alike, and progress is told now and then
LEAST_ALLOWANCE = 1.1
# what ends as good as now
_LEAST_S = 1e-9


def minds(one: RequestView) -> bool:
    """Whether it matters for what becomes of a request that it would be late."""
    return one.when_late == "refuse" or one.fewest_steps is not None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would come of a group.

    Attributes:
        late_s: seconds by which one who minds is late, or another is made late; 0 or less if
            nobody is.
        is_followed: whether all that is there was followed for it.
        exchange: what it takes for that; None if nobody need give way.
        bearable: where somebody is late, by what predictions might be exceeded with nobody late:
            less than they are stretched by.
    """

    late_s: float
    is_followed: bool
    exchange: Exchange | None = None
    bearable: float = math.inf


def outlook_of(group: Sequence[RequestView], queue: QueueView) -> Outlook:
    """Return what would come of a group that is let in now, all of one model.

    Where not all can be followed, one of them must mind.
    """
    now_s = group[0].arrival_s
    scene = queue.scene(group, now_s)
    if scene is not None:
        return _outlook_there(group, scene, queue)
    slacks_s = np.array([one.deadline_s - now_s for one in group])
    is_minding = np.array([minds(one) for one in group])
    allowance = queue.allowance(group[0].model, is_followed=False)
    own_s = ends_of_group_s(group, queue)[is_minding], slacks_s[is_minding]
    ends_s, slacks_s = np.concatenate([own_s, _others_s(group, queue, now_s)], axis=1)
    late_s = float((allowance * ends_s - slacks_s).max())
    return Outlook(late_s, is_followed=False, bearable=_bearable(ends_s, slacks_s))


def _outlook_there(group: Sequence[RequestView], scene: ForecastView, queue: QueueView) -> Outlook:
    """The same where all that is there can be followed; who comes later can be refused then."""
    allowance = _followed_allowance(group[0].model, queue)
    there = _There(group, replace(scene, later=()), allowance)
    late_s = there.late_s(there.scene)
    if late_s > 0 and queue.has_preemption:
        for exchange in exchanges(group, there.scene):
            if there.late_s(exchange.scene) <= 0:
                # who comes later counts for the prediction
                seen = replace(exchange.scene, later=scene.later)
                return Outlook(0.0, True, replace(exchange, scene=seen))
    return Outlook(late_s, True, bearable=there.bearable if late_s > 0 else math.inf)


class _There:
    """A group among all that is there of its model.

    Args:
        scene: with the group in its line.
        allowance: what predictions are multiplied by.
    """

    def __init__(self, group: Sequence[RequestView], scene: ForecastView, allowance: float) -> None:
        self.scene = scene
        self._allowance = allowance
        self._own = {one.request_id for one in group}
        # a group that minds nothing is asked about for its own sake
        self._minding = [one.request_id for one in group if minds(one)] or list(self._own)

    def late_s(self, scene: ForecastView) -> float:
        """Seconds by which one of the group who minds is late in a scene, or who was not before."""
        late_by_id = self._lates_s(scene)
        found_s = max(late_by_id[one] for one in self._minding)
        for one, late_s in late_by_id.items():
            if late_s > found_s and late_s > 0 and one not in self._own and self._before[one] <= 0:
                found_s = late_s
        return found_s

    @property
    def bearable(self) -> float:
        """By what predictions might be exceeded with none of these late."""
        ends_s, before_s = forecast_s(self.scene), self._before
        concerned = [
            (ends_s[one.request_id], one.deadline_s - self.scene.now_s)
            for one in self.scene.requests
            if one.request_id in self._minding or before_s.get(one.request_id, math.inf) <= 0
        ]
        return _bearable(*np.array(concerned).T)

    @cached_property
    def _before(self) -> Mapping[str, float]:
        """By how much everybody is late without the group."""
        line = [one for one in self.scene.line if one.request_id not in self._own]
        return self._lates_s(replace(self.scene, line=line))

    def _lates_s(self, scene: ForecastView) -> dict[str, float]:
        """Seconds by which each request of a scene is late, negative for those in time."""
        ends_s = forecast_s(scene)
        return {
            one.request_id: self._allowance * ends_s[one.request_id]
            - (one.deadline_s - scene.now_s)
            for one in scene.requests
        }


def _others_s(group: Sequence[RequestView], queue: QueueView, now_s: float) -> Floats:
    """Seconds to the ends of those who wait behind a group and would be in time without it, and to
    their deadlines, [2, N]."""
    first = min(group, key=queue_key)
    behind, pool = queue.behind(first), queue.pool(first.model)
    if pool is None or not len(behind.deadlines_s):
        return np.zeros((2, 0))
    before = amounts_of(queue.ahead_of(first))
    more = sum((amounts_of(load_of(one)) for one in group), np.zeros_like(before))
    line, slacks_s = LineEnds(behind.amounts, pool), behind.deadlines_s - now_s
    allowance = queue.allowance(first.model, is_followed=False)
    in_time = allowance * line.after(before) <= slacks_s
    return np.stack([line.after(before + more)[in_time], slacks_s[in_time]])


def _bearable(ends_s: Floats, slacks_s: Floats) -> float:
    """By what all of these ends may be later, as a factor; 0 where somebody is late by now."""
    return max(0.0, float((slacks_s / np.maximum(ends_s, _LEAST_S)).min()))


def ends_of_group_s(group: Sequence[RequestView], queue: QueueView) -> Floats:
    """Seconds until each of the group is done, [N], if all of them come to the last one's place."""
    last = max(group, key=queue_key)
    return _ends_behind_s(group, last, amounts_of(queue.ahead_of(last)), queue)


def alone_s(group: Sequence[RequestView], queue: QueueView) -> float | None:
    """Return the seconds that a group can be promised in with nothing else there, if that is late.

    Predictions are made and stretched as they would be for the group now. So where all that is
    there can be followed, it is let in by whoever has nothing else to do if, and only if, it has
    this long.

    Returns:
        None if everybody who minds being late would be in time then.
    """
    ends_s = _ends_alone_s(group, queue)
    slacks_s = np.array([one.deadline_s - one.arrival_s for one in group])
    is_minding = np.array([minds(one) for one in group])
    is_late = (ends_s > slacks_s) & is_minding
    return float(ends_s[is_minding].max()) if is_late.any() else None


def _ends_alone_s(group: Sequence[RequestView], queue: QueueView) -> Floats:
    """Seconds to the end of each of a group with nothing else there, stretched, [N]."""
    model = group[0].model
    scene = queue.scene(group, group[0].arrival_s)
    if scene is None:
        last = max(group, key=queue_key)
        ends_s = _ends_behind_s(group, last, np.zeros_like(amounts_of(load_of(last))), queue)
        return queue.allowance(model, is_followed=False) * ends_s
    idle = replace(
        scene,
        replicas=[replace(one, told_s=0.0, held=(), leased=()) for one in scene.replicas],
        line=sorted(group, key=queue_key),
        later=(),
    )
    end_by_id = forecast_s(idle)
    ends_s = np.array([end_by_id[one.request_id] for one in group])
    return _followed_allowance(model, queue) * ends_s


def _followed_allowance(model: str, queue: QueueView) -> float:
    return max(LEAST_ALLOWANCE, queue.allowance(model, is_followed=True))


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
