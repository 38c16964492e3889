"""Every exception, refusal and failure of a call as an error of OpenAI's form."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from ray_cluster.api.access.middleware import HttpMiddleware, request_id_of
from ray_cluster.api.advice import wrong
from ray_cluster.api.errors import (
    DEFAULT_RETRY_AFTER_S,
    ApiError,
    model_not_found,
    model_not_ready,
    stage_not_ready,
    unavailable,
    whole_seconds,
)
from ray_cluster.api.input.validation import describe
from ray_cluster.config.kinds import KINDS
from ray_cluster.config.validation_errors import must_be
from ray_cluster.errors import LAST_STAGES, InvalidRequest, JobStoreUnavailable, Unavailable
from ray_cluster.policies.types import Offer
from ray_cluster.requests import Failure, ImageRequest
from ray_cluster.storage.blob_store import BlobStoreError

logger = logging.getLogger(__name__)

# nginx's custom for a client that left; nobody reads it
CLIENT_CLOSED_REQUEST = 499
_METHODS = ("GET", "HEAD", "POST", "DELETE")


def install(app: FastAPI) -> None:
    """Register the handlers of the expected exceptions on ``app``."""

    async def expected(request: Request, error: Exception) -> Response:
        return _api_error(request, error).response()

    async def disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    ours = (ApiError, InvalidRequest, Unavailable, BlobStoreError)
    for kind in (*ours, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(ClientDisconnect, disconnected)


class UnexpectedErrorMiddleware(HttpMiddleware):
    """Answers an unexpected exception with 500, and raises it again for the server.

    Starlette's handler of ``Exception`` runs outside of all middleware: its reply would have no
    request id, and no page from another origin could read it.
    """

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call."""
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            request_id = request_id_of(Request(scope))
            logger.error("request %s failed unexpectedly", request_id, exc_info=error)
            if not has_begun:
                answer = ApiError(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    f"The service failed unexpectedly; its log tells more under {request_id}.",
                    code="internal_error",
                )
                await answer.response()(scope, receive, send)
            raise


def _api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return from_invalid(error)
        case RequestValidationError():
            return _of_fastapi(error)
        case HTTPException():
            return _of_starlette(request, error)
        case BlobStoreError():
            # of the input store: whoever reads results answers by themselves
            logger.error("an image that a client sends is not stored or read: %s", error)
            return unavailable(
                "The store of images that calls send does not answer; try again.",
                "input_store_unavailable",
            )
    assert isinstance(error, Unavailable)
    logger.warning("a call is not served: %s: %s", type(error).__name__, error)
    return from_unavailable(error)


def _of_fastapi(error: RequestValidationError) -> ApiError:
    item = error.errors()[0]
    name = str(item["loc"][-1])
    allowed = must_be(item)
    what = f"is wrong: {item['msg']}" if allowed is None else f"must be {allowed}"
    return from_invalid(wrong(name, f"{what}; given {describe(item['input'])}"))


def _of_starlette(request: Request, error: HTTPException) -> ApiError:
    what = f"{request.method} {request.scope['path']}"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(request))
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"There is no {what}; /docs lists the calls."
        code = "unknown_url"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{what} is not allowed; use {headers['Allow']}."
        code = "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    return ApiError(error.status_code, message, code=code, headers=headers)


def _methods(request: Request) -> list[str]:
    """Return all methods of a path; Starlette names those of the first route alone."""

    def is_there(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in _METHODS if is_there(method)]


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
            return model_not_ready(model, offer.retry_after_s or DEFAULT_RETRY_AFTER_S)
        case "stage_not_ready":
            return stage_not_ready(offer.lane)
        case "closing":
            return unavailable(
                "The service is stopping and accepts no more requests. Try again once it is back.",
                "shutting_down",
            )
        case "never_fits":
            what = f"is {len(requests)}, more than the service's whole queue holds"
            return from_invalid(wrong("n", what, "ask for less"))
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


def from_invalid(error: InvalidRequest) -> ApiError:
    """Return the 400 for a wrong parameter."""
    return ApiError(HTTPStatus.BAD_REQUEST, error.message, code=error.code, param=error.param)


def from_unavailable(error: Unavailable) -> ApiError:
    """Return the 503 for a part of the service that is away."""
    if isinstance(error, JobStoreUnavailable):
        return unavailable(
            "The store of jobs cannot be read or written just now; try again. Images without an "
            "Idempotency-Key need no job and are made.",
            "job_store_unavailable",
        )
    return unavailable(
        "The dispatcher does not answer (it is starting or restarting); try again.",
        "dispatcher_unavailable",
    )


def from_failure(failure: Failure) -> ApiError:
    """Return the error for an image that was admitted and not made.

    ``error`` depends on the request alone (the same values give the same exception): no retry,
    unless it came from the result store, that of inputs or a LoRA's source, which may work again
    later.
    ``lost`` on a replica means that several died under it. The request itself may be the cause,
    and every repetition costs as many replicas again: no client library shall repeat it.
    ``lost`` in the queue (the dispatcher was restarted) and ``aborted`` (its client seemed gone)
    say nothing about the request: another try can succeed.
    """
    if failure.kind == "invalid":
        return from_invalid(InvalidRequest(failure.message, failure.param, failure.code))
    what = f"{failure.message} (image {failure.request_id}, stage {failure.stage})"
    match failure.stage:
        case "storing":
            return _gone(
                "The image was made and could not be kept", what, "result_store_unavailable"
            )
        case "input":
            called = "Images of the call could not be read again"
            return _gone(called, what, "input_store_unavailable")
        case "lora":
            return _gone("A LoRA could not be fetched", what, "lora_unavailable")
        case "control":
            return _gone("A ControlNet was not there", what, "controlnet_unavailable")
    if failure.kind == "error":
        status, work = HTTPStatus.INTERNAL_SERVER_ERROR, _last_work(failure)
        if work:
            message = f"The image was made, but its {work} failed: {what}."
            return ApiError(status, message, code=f"{work}_error")
        message = f"The model failed on this request: {what}. The same request would fail again."
        return ApiError(status, message, code="model_error")
    is_suspect = failure.kind == "lost" and failure.stage != "queue"
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"The image was {failure.kind}: {what}. Try again.",
        code=f"image_{failure.kind}",
        retry_after_s=DEFAULT_RETRY_AFTER_S,
        retry="asked" if is_suspect else "self",
    )


def _last_work(failure: Failure) -> str:
    """Return what the last stage does that has failed; empty for any other stage."""
    return next((KINDS[kind].work for kind in LAST_STAGES if kind == failure.stage), "")


def _gone(what: str, why: str, code: str) -> ApiError:
    return unavailable(f"{what}: {why}. Try again.", code)
