"""Names of what stages leave in stores, by request and stage.

The first stage has the request's own id, so that a request with one stage has the names that
requests had before there were stages. Only the public name of an image can be downloaded: no name
of a candidate is one, so that no client sees a light image before it is decided on.
"""

from __future__ import annotations

from ray_cluster import requests
from ray_cluster.dispatch.stages import Route
from ray_cluster.requests import ImageRequest


def stage_id(request_id: str, stage_index: int) -> str:
    """Return the id under which a stage of a request is queued and leased."""
    return request_id if stage_index == 0 else f"{request_id}.{stage_index}"


def state_name(request_id: str, stage_index: int) -> str:
    """Return the name of a stage's exported state in the state store."""
    return requests.state_name(stage_id(request_id, stage_index))


def candidate_name(request_id: str, stage_index: int) -> str:
    """Return the name of an encoded image that is not published, or not yet."""
    return f"{request_id}.{stage_index}.candidate"


def image_name(request: ImageRequest, route: Route, stage_index: int) -> str:
    """Return the name under which a stage stores its image, encoded.

    The last stage publishes at once, under the public name; an earlier one stores a candidate.

    Raises:
        ValueError: the stage makes no image.
    """
    stage = route.stages[stage_index]
    if stage.kind != "denoise":
        raise ValueError(f"stage {stage_index} stores no image: it is {stage}")
    if stage_index + 1 == len(route.stages):
        return request.file_id
    return candidate_name(request.request_id, stage_index)


def private_names(request_id: str, route: Route) -> tuple[str, ...]:
    """Return all names that stages of a request may have in stores, but for public ones.

    Once the request has ended, there is nothing under them that anybody needs.
    """
    makers = [index for index, one in enumerate(route.stages) if one.kind == "denoise"]
    states = (state_name(request_id, index) for index in makers)
    candidates = (candidate_name(request_id, index) for index in makers[:-1])
    return (*states, *candidates)
