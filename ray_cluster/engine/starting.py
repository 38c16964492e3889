"""From requests to the states that their first step starts from."""

from __future__ import annotations

from collections.abc import Sequence

from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.reuse_steps import check_reuse
from ray_cluster.engine.state import RequestState
from ray_cluster.requests import ImageRequest


def start_states(
    model: LoadedModel, requests: Sequence[ImageRequest], *, now_s: float
) -> list[RequestState]:
    """Encode requests together; arrival and deadline are both the present instant for now.

    Raises:
        ValueError: the model cannot run a request's reuse schedule.
    """
    conditionings = model.encoder.encode(requests)
    states = [
        RequestState.start(
            request,
            conditioning,
            latent_shape=model.executor.latent_shape(request.width_px, request.height_px),
            table=model.tables.table(request.sampler, request.num_steps, request.size_px),
            arrival_s=now_s,
            deadline_s=now_s,
        )
        for request, conditioning in zip(requests, conditionings, strict=True)
    ]
    for state in states:
        check_reuse(state, model.executor)
    return states
