"""Why the dispatcher did not admit a group, as an answer that says what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from ray_cluster.api.errors import (
    DEFAULT_RETRY_AFTER_S,
    ApiError,
    model_not_found,
    model_not_ready,
    whole_seconds,
)
from ray_cluster.policies.types import Offer, RefusalReason
from ray_cluster.requests import ImageRequest


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What an answer may name.

    Attributes:
        offer: the dispatcher's.
        requests: the group.
        known: models that there are, the default first.
    """

    offer: Offer
    requests: Sequence[ImageRequest]
    known: Collection[str]

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def wait_s(self) -> int:
        return whole_seconds(self.offer.retry_after_s)


def from_refusal(
    offer: Offer, requests: Sequence[ImageRequest], known: Collection[str]
) -> ApiError:
    """Return the error for a group that the dispatcher did not admit.

    Args:
        offer: the dispatcher's answer; its own ``duplicate_id`` is no caller's to hear.
        requests: the group, at least one.
        known: models that there are.
    """
    if offer.reason is None or offer.reason == "duplicate_id":
        raise ValueError(f"there is no answer to a caller for {offer}")
    return _ANSWERS[offer.reason](_Refusal(offer, requests, known))


def _closing(_refusal: _Refusal) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The service is stopping and takes no more requests. Try again once it is back.",
        code="shutting_down",
        retry_after_s=DEFAULT_RETRY_AFTER_S,
    )


def _too_many_jobs(_refusal: _Refusal) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        "You have as many open jobs as this service keeps for one client. Wait for some of "
        "them to end, or cancel some.",
        code="too_many_jobs",
        retry_after_s=DEFAULT_RETRY_AFTER_S,
        retry="asked",
    )


def _client_limit(refusal: _Refusal) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"This call asks for {len(refusal.requests)} images on top of those that you have in "
        f"flight; together, this service makes at most {refusal.offer.limit} for one client "
        "(limits.max_attached_images_per_client). Some of yours should be done in "
        f"{refusal.wait_s} s. Try again then, or make jobs of them (POST /v1/jobs).",
        code="too_many_images_in_flight",
        retry_after_s=refusal.wait_s,
    )


def _never_fits(refusal: _Refusal) -> ApiError:
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"The parameter 'n' is {len(refusal.requests)}, more than the service's whole queue "
        "holds. Make several calls with fewer images.",
        code="invalid_value",
        param="n",
    )


def _too_late(refusal: _Refusal) -> ApiError:
    if math.isinf(refusal.offer.retry_after_s):
        return _too_long(refusal.offer.predicted_s)
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        "This would probably miss its deadline, or make others miss theirs, and "
        f"'when_late' is 'refuse'. Try again in {refusal.wait_s} s, allow more seconds with "
        "'slo_s', or send 'when_late': 'accept'.",
        code="would_be_late",
        param="when_late",
        retry_after_s=refusal.wait_s,
        retry="asked",
    )


def _too_long(needs_s: float) -> ApiError:
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"With nothing else to do this can be promised within {_rounded_up(needs_s)} s, more than "
        "'slo_s' allows, and 'when_late' is 'refuse'. Allow more seconds, ask for fewer steps, "
        "smaller or fewer images, or send 'when_late': 'accept'.",
        code="deadline_too_short",
        param="slo_s",
    )


def _rounded_up(seconds: float) -> str:
    """Write a number that is promised with two digits, and never less than it is."""
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1) if seconds > 0 else 1.0
    up = math.ceil(seconds / digit - 1e-9)
    return f"{up * digit:.10g}"


def _queue_full(refusal: _Refusal) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"The queue is full; there should be room again in {refusal.wait_s} s. "
        "Try again then, or ask for fewer images.",
        code="queue_full",
        retry_after_s=refusal.wait_s,
    )


_ANSWERS: Mapping[RefusalReason, Callable[[_Refusal], ApiError]] = {
    "unknown_model": lambda one: model_not_found(one.model, one.known),
    "model_not_ready": lambda one: model_not_ready(
        one.model, one.offer.retry_after_s or DEFAULT_RETRY_AFTER_S
    ),
    "closing": _closing,
    "too_many_jobs": _too_many_jobs,
    "client_limit": _client_limit,
    "never_fits": _never_fits,
    "too_late": _too_late,
    "queue_full": _queue_full,
}
