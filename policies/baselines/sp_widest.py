"""Every request on all GPUs that it can use, one after the other by deadline, with preemption.

What is left of :mod:`ray_cluster.policies.sp_rounds` without a choice of degrees: a claim for
changing them has to be made against this.
"""

from __future__ import annotations

from ray_cluster.policies.sp_fluid import Work, grant_wide, simulate
from ray_cluster.policies.sp_rounds import work_of
from ray_cluster.policies.sp_types import GroupView, RoundDecision, is_hopeless


def plan_widest(view: GroupView) -> RoundDecision:
    """Serve by deadline at the largest degree; under overload sacrifice the costliest.

    The costliest is sought among those up to the first late one. Sacrificed requests come after all
    others, hopeless ones are dropped.
    """
    dropped, works = [], []
    for place, request in enumerate(view.requests):
        if is_hopeless(request, view.now_s):
            dropped.append(request.request_id)
        else:
            works.append(work_of(place, request, view))
    works.sort(key=lambda work: (work.due_s, work.place))
    sacrificed: list[Work] = []
    while True:
        plan = simulate(works, view.num_gpus, view.now_s, switch_s=view.switch_s, manner="wide")
        if plan.first_late is None:
            break
        victim = max(range(plan.first_late + 1), key=lambda number: works[number].widest_gpu_s)
        sacrificed.append(works.pop(victim))
    order = [*works, *sorted(sacrificed, key=lambda work: (work.due_s, work.place))]
    granted = grant_wide([work.menu for work in order], range(len(order)), view.num_gpus)
    degrees = [0] * len(view.requests)
    for number, level in granted.items():
        degrees[order[number].place] = order[number].menu.degrees[level]
    lost = tuple(view.requests[work.place].request_id for work in sacrificed)
    return RoundDecision(tuple(degrees), tuple(dropped), lost)
