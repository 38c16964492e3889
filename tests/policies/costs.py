"""What a request takes in plain words, for the sums that policies keep to be held against."""

from __future__ import annotations

from ray_cluster.policies.admission.load import load_of, load_s
from ray_cluster.policies.costs.cost_model import share_cost
from ray_cluster.policies.types import RequestView, StepCost


def batch_s(cost: StepCost, request: RequestView, num_in_batch: int) -> float:
    """Return the seconds until the request is done in a batch of that many of its like."""
    load = load_of(request)
    together = load._replace(
        step_pixels=num_in_batch * load.step_pixels,
        step_squares=num_in_batch * load.step_squares,
    )
    return load_s(cost, together)


def alone_s(cost: StepCost, request: RequestView) -> float:
    """Return the seconds until the request is done with the replica to itself."""
    return load_s(cost, load_of(request))


def share_s(cost: StepCost, request: RequestView, max_batch: int) -> float:
    """Return the seconds of replica time that the request takes inside full batches.

    The sum over many requests is the time in which a busy replica works them off.
    """
    return alone_s(share_cost(cost, max_batch), request)
