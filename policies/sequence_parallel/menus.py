"""What a step of a request costs at each degree, from what steps were measured to cost."""

from __future__ import annotations

from ray_cluster.policies.costs.cost_model import decode_s, step_s, work_of
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, menu_of
from ray_cluster.policies.types import DegreeCost, GroupCost, RequestView, StepCost


def menu_of_request(request: RequestView, group: GroupCost) -> DegreeMenu:
    """Return the menu of a request: the degrees that pay for it, each in its faster way."""
    work = work_of([request])
    most = (request.width_px // group.token_px) * (request.height_px // group.token_px)
    usable = [one for one in group.costs if one.degree <= most] or group.costs[:1]
    return menu_of(
        f"{request.width_px}x{request.height_px}",
        {one.degree: min(step_s(cost, work) for cost in _ways(one, request)) for one in usable},
        num_gpus=group.num_ranks,
        tail_s=decode_s(group.costs[0].cost, request),
        work=work.megapixels * request.num_steps,
    )


def is_apart(request: RequestView, one: DegreeCost) -> bool:
    """Whether a step of a request is faster with its model rows on two halves of the ranks."""
    together, *apart = (step_s(cost, work_of([request])) for cost in _ways(one, request))
    return bool(apart) and apart[0] < together


def _ways(one: DegreeCost, request: RequestView) -> list[StepCost]:
    if one.apart is None or not request.uses_guidance:
        return [one.cost]
    return [one.cost, one.apart]
