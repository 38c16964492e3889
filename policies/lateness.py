"""Whether a group that is let in will be late, or make others late, and who might give way to it.

Where little is there, all of it is followed step by step (:mod:`ray_cluster.policies.forecast`);
more flows as a fluid (:mod:`ray_cluster.policies.prediction`). Predictions are stretched by how
wrong they have been of late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ray_cluster.policies.forecast import Scene, forecast_s
from ray_cluster.policies.load import amounts_of, load_of
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.prediction import Floats, LineEnds, ends_s
from ray_cluster.policies.preemption import Exchange, exchanges
from ray_cluster.policies.queue_view import QueueView
from ray_cluster.policies.types import RequestView

# what predictions are at least multiplied by where everybody there was followed: steps are not all
# alike, and progress is told now and then
LEAST_ALLOWANCE = 1.1


def minds(one: RequestView) -> bool:
    """Whether it matters for what becomes of a request that it would be late."""
    return one.when_late == "refuse" or one.fewest_steps is not None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would come of a group.

    Attributes:
        late_s: seconds by which one who minds is late, or another is made late; 0 or less if
            nobody is.
        exchange: what it takes for that; None if nobody need give way.
    """

    late_s: float
    exchange: Exchange | None = None


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
    safe_s = queue.allowance(group[0].model, is_followed=False) * ends_of_group_s(group, queue)
    return Outlook(max(float((safe_s - slacks_s)[is_minding].max()), _harm_s(group, queue, now_s)))


def _outlook_there(group: Sequence[RequestView], scene: Scene, queue: QueueView) -> Outlook:
    """The same where all that is there can be followed; who comes later can be refused then."""
    known = queue.allowance(group[0].model, is_followed=True)
    there = _There(group, replace(scene, later=()), max(LEAST_ALLOWANCE, known))
    late_s = there.late_s(there.scene)
    if late_s > 0 and queue.has_preemption:
        for exchange in exchanges(group, there.scene):
            if there.late_s(exchange.scene) <= 0:
                # who comes later counts for the prediction
                seen = replace(exchange.scene, later=scene.later)
                return Outlook(0.0, replace(exchange, scene=seen))
    return Outlook(late_s)


class _There:
    """A group among all that is there of its model.

    Args:
        scene: with the group in its line.
        allowance: what predictions are multiplied by.
    """

    def __init__(self, group: Sequence[RequestView], scene: Scene, allowance: float) -> None:
        self.scene = scene
        self._allowance = allowance
        self._own = {one.request_id for one in group}
        # a group that minds nothing is asked about for its own sake
        self._minding = [one.request_id for one in group if minds(one)] or list(self._own)

    def late_s(self, scene: Scene) -> float:
        """Seconds by which one of the group who minds is late in a scene, or who was not before."""
        late_by_id = self._lates_s(scene)
        found_s = max(late_by_id[one] for one in self._minding)
        for one, late_s in late_by_id.items():
            if late_s > found_s and late_s > 0 and one not in self._own and self._before[one] <= 0:
                found_s = late_s
        return found_s

    @cached_property
    def _before(self) -> Mapping[str, float]:
        """By how much everybody is late without the group."""
        line = [one for one in self.scene.line if one.request_id not in self._own]
        return self._lates_s(replace(self.scene, line=line))

    def _lates_s(self, scene: Scene) -> dict[str, float]:
        """Seconds by which each request of a scene is late, negative for those in time."""
        ends_s = forecast_s(scene)
        return {
            one.request_id: self._allowance * ends_s[one.request_id]
            - (one.deadline_s - scene.now_s)
            for one in scene.requests
        }


def _harm_s(group: Sequence[RequestView], queue: QueueView, now_s: float) -> float:
    """Seconds by which a group makes somebody late who waits behind it and would be in time."""
    first = min(group, key=queue_key)
    behind, pool = queue.behind(first), queue.pool(first.model)
    if pool is None or not len(behind.deadlines_s):
        return 0.0
    before = amounts_of(queue.ahead_of(first))
    more = sum((amounts_of(load_of(one)) for one in group), np.zeros_like(before))
    line, slacks_s = LineEnds(behind.amounts, pool), behind.deadlines_s - now_s
    allowance = queue.allowance(first.model, is_followed=False)
    in_time = allowance * line.after(before) <= slacks_s
    late_s = allowance * line.after(before + more) - slacks_s
    return float(late_s[in_time].max(initial=0.0))


def ends_of_group_s(group: Sequence[RequestView], queue: QueueView) -> Floats:
    """Seconds until each of the group is done, [N], if all of them come to the last one's place."""
    last = max(group, key=queue_key)
    pool = queue.pool(last.model)
    if pool is None:
        raise ValueError(f"there is no replica of {last.model} to predict from")
    own = np.array([amounts_of(load_of(one)) for one in group]).T
    ahead = amounts_of(queue.ahead_of(last))
    if len(group) > 1:
        ahead = ahead + own.sum(axis=1) - amounts_of(load_of(last))
    return ends_s(own, ahead, pool)
