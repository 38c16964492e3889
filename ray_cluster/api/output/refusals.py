"""Why the dispatcher did not admit a group, as an answer that says what to do about it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from http import HTTPStatus

from ray_cluster.api.errors import (
    DEFAULT_RETRY_AFTER_S,
    ApiError,
    model_not_found,
    model_not_ready,
    unavailable,
    whole_seconds,
)
from ray_cluster.policies.types import Offer
from ray_cluster.requests import ImageRequest


def from_refusal(
    offer: Offer, requests: Sequence[ImageRequest], known: Collection[str]
) -> ApiError:
    """Return the error for a group that the dispatcher did not admit.

    Args:
        offer: the dispatcher's answer, other than ``duplicate_id``.
        requests: the group, at least one.
        known: the models that exist, the default one first.
    """
    model = requests[0].called_model
    match offer.reason:
        case "unknown_model":
            return model_not_found(model, known)
        case "model_not_ready":
            return model_not_ready(
                requests[0].called_model, offer.retry_after_s or DEFAULT_RETRY_AFTER_S
            )
        case "closing":
            return unavailable(
                "The service is stopping and accepts no more requests. Try again once it is back.",
                "shutting_down",
            )
        case "never_fits":
            return ApiError(
                HTTPStatus.BAD_REQUEST,
                f"The parameter 'n' is {len(requests)}, more than the service's whole queue "
                "holds. Make several calls with fewer images.",
                code="invalid_value",
                param="n",
            )
        case "too_late" if math.isinf(offer.retry_after_s):
            return _deadline_too_short(offer.predicted_s)
    return _too_many_requests(offer, model, len(requests))


def _too_many_requests(offer: Offer, model: str, num_images: int) -> ApiError:
    """Return the 429 for what can be admitted later."""
    wait_s = whole_seconds(offer.retry_after_s)
    param, is_asked = None, False
    match offer.reason:
        case "too_late":
            code, param, is_asked = "would_be_late", "when_late", True
            message = (
                "This would probably miss its deadline, or make others miss theirs, and "
                f"'when_late' is 'refuse'. Try again in {wait_s} s, allow more seconds with "
                "'slo_s', or send 'when_late': 'accept'."
            )
        case "too_many_jobs":
            code, is_asked, wait_s = "too_many_jobs", True, whole_seconds(DEFAULT_RETRY_AFTER_S)
            message = (
                "You have as many open jobs as this service keeps for one client. Wait for some "
                "of them to end, or cancel some."
            )
        case "client_limit":
            code = "too_many_images_in_flight"
            message = (
                f"This call asks for {num_images} images on top of those that you have in flight; "
                f"together, this service makes at most {offer.limit} for one client "
                "(limits.max_attached_images_per_client). Some of yours should be done in "
                f"{wait_s} s. Try again then, or make jobs of them (POST /v1/jobs)."
            )
        case "queue_full" if offer.limit == 0:
            code = "queue_full"
            message = (
                f"All clients together have filled the queue of {model!r}; it should have free "
                f"slots in {wait_s} s. Try again then."
            )
        case "queue_full":
            code = "queue_full"
            message = _share_is_full(f"the queue of {model!r}", offer, wait_s, num_images)
        case "held_back_full":
            code, wait_s = "too_many_held_back", whole_seconds(DEFAULT_RETRY_AFTER_S)
            where = f"the queue of {model!r}, with what waits for LoRAs and ControlNets,"
            message = _share_is_full(where, offer, wait_s, num_images)
        case _:
            raise ValueError(f"there is no answer to a caller for {offer}")
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        message,
        code=code,
        param=param,
        retry_after_s=wait_s,
        retry="asked" if is_asked else "self",
    )


def _share_is_full(where: str, offer: Offer, wait_s: int, num_images: int) -> str:
    fewer = ", or ask for fewer images" if num_images > 1 else ""
    share = ""
    if offer.limit is not None:
        share = f" At present it is {offer.limit} image{'' if offer.limit == 1 else 's'}."
    return (
        f"Your share of {where} is full.{share} It follows from limits.max_queued_images, "
        "limits.max_queue_s and how many clients wait there. It should have free slots in "
        f"{wait_s} s; try again then{fewer}."
    )


def _deadline_too_short(needs_s: float) -> ApiError:
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"Even on an idle service this may take {_rounded_up(needs_s)} s, more than 'slo_s' "
        "allows, and 'when_late' is 'refuse'. Allow more seconds, ask for fewer steps, smaller or "
        "fewer images, or send 'when_late': 'accept'.",
        code="deadline_too_short",
        param="slo_s",
    )


def _rounded_up(seconds: float) -> str:
    """Write a predicted time with two digits, never less than it is."""
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1) if seconds > 0 else 1.0
    up = math.ceil(seconds / digit - 1e-9)
    return f"{up * digit:.10g}"
