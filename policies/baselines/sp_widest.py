"""Every request on all GPUs that it can use, one after the other by deadline, with preemption.

What is left of :mod:`ray_cluster.policies.sequence_parallel.rounds` without a choice of degrees: a
claim for changing them has to be made against this.
"""

from __future__ import annotations

from ray_cluster.policies.sequence_parallel.fluid import grant_wide, simulate
from ray_cluster.policies.sequence_parallel.rounds import sort_out
from ray_cluster.policies.sequence_parallel.types import GroupView, RoundDecision


def plan_widest(view: GroupView, doubt: float = 0.1) -> RoundDecision:
    """Serve by deadline at the largest degree; under overload sacrifice the costliest.

    The costliest is sought among those up to the first late one. Sacrificed requests come after all
    others, and after them those that are late by what is believed.

    Args:
        view: of the group.
        doubt: as in :class:`ray_cluster.policies.sequence_parallel.rounds.RoundOptions`.
    """
    sorted_out = sort_out(view, doubt)
    works, lost = list(sorted_out.hopeful), []
    while True:
        plan = simulate(works, view.num_gpus, view.now_s, switch_s=view.switch_s, manner="wide")
        if plan.first_late is None:
            break
        victim = max(range(plan.first_late + 1), key=lambda number: works[number].widest_gpu_s)
        lost.append(works.pop(victim))
    sacrificed = [*sorted(lost, key=lambda work: (work.due_s, work.row)), *sorted_out.doubtful]
    order = [*works, *sacrificed]
    granted = grant_wide([work.menu for work in order], range(len(order)), view.num_gpus)
    degrees = [0] * len(view.requests)
    for number, level in granted.items():
        degrees[order[number].row] = order[number].menu.degrees[level]
    ids = tuple(view.requests[work.row].request_id for work in sacrificed)
    return RoundDecision(
        tuple(degrees), tuple(view.requests[work.row].request_id for work in sorted_out.late), ids
    )
