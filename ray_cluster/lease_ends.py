"""What a replica makes of a lease's state, and what it says when a lease ends."""

from __future__ import annotations

import logging

import torch

from ray_cluster.engine.state import RequestState
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.leases import Lease, Returned
from ray_cluster.requests import Failure

logger = logging.getLogger(__name__)


def restored_state(
    lease: Lease, *, device: torch.device, arrival_s: float, deadline_s: float
) -> RequestState | None:
    """Return the state to go on from, if there is one and it can be read."""
    if lease.state is None:
        return None
    request = lease.request
    try:
        state = RequestState.from_bytes(
            lease.state, device=device, arrival_s=arrival_s, deadline_s=deadline_s
        )
        if state.request != request:
            raise ValueError(f"the state is of {state.request}")
    except ValueError as error:
        logger.warning("request %s starts over: %s", request.request_id, error)
        return None
    return state


def returned(lease: Lease, state: RequestState | None) -> Returned:
    """Return the event that hands a lease back, with what has been done of it."""
    data = state.to_bytes() if state is not None else None
    steps_done = state.step_index if state is not None else 0
    return Returned(lease.request.request_id, lease.fence, data, steps_done)


def failure_of(request_id: str, error: RequestFailed | InvalidRequest) -> Failure:
    """Return what the client is told of an error."""
    if isinstance(error, InvalidRequest):
        return Failure(request_id, "invalid", error.message, "encode", error.param)
    return Failure(request_id, "error", error.message, error.stage)
