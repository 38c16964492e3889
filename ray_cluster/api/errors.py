"""Errors in OpenAI's form, with retry advice that its clients obey.

The ``openai`` client retries 408, 409, 429 and 5xx by itself, twice; the header
``x-should-retry`` overrules it. So a failure that would come back says ``false``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import Literal

from starlette.responses import Response

from ray_cluster.config.kinds import KINDS
from ray_cluster.errors import InvalidRequest, RayClusterError
from ray_cluster.protocol.leases import split_lane

# nothing predicts how long a model loads or a dispatcher restarts; shorter than either
DEFAULT_RETRY_AFTER_S = 5.0


class ApiError(RayClusterError):
    """An answer other than success.

    Args:
        message: what was given, what is allowed, what to change.
        code: short machine-readable reason.
        param: the parameter that is wrong, as the API spells it.
        retry_after_s: seconds after which the same call can succeed; None where it never will,
            infinite where nothing predicts it.
        retry: ``self`` where a client library may repeat the call without asking, as far as there
            is a ``retry_after_s``; ``asked`` where only a person should.
        headers: further headers of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        retry_after_s: float | None = None,
        retry: Literal["self", "asked"] = "self",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, status, code, param)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.retry = retry
        self.extra_headers = headers or {}

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        """Retry advice and what else the status demands."""
        headers = {"x-should-retry": "false", **self.extra_headers}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(whole_seconds(self.retry_after_s))
            if self.retry == "self":
                headers["x-should-retry"] = "true"
        return headers

    def body(self) -> str:
        """Return the JSON; ASCII only, so that no text of a caller can break its coding."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error})

    def response(self) -> Response:
        """Return the reply."""
        return Response(self.body(), self.status, self.headers, "application/json")


def whole_seconds(wait_s: float) -> int:
    """Return a wait as the header ``Retry-After`` writes it: at least one, rounded up."""
    return max(1, math.ceil(wait_s if math.isfinite(wait_s) else DEFAULT_RETRY_AFTER_S))


def unavailable(
    message: str,
    code: str,
    *,
    param: str | None = None,
    retry_after_s: float = DEFAULT_RETRY_AFTER_S,
) -> ApiError:
    """Return a 503 after which any client may try again."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return ApiError(status, message, code=code, param=param, retry_after_s=retry_after_s)


def too_large(error: InvalidRequest) -> ApiError:
    """Return the 413 for a body, or a part of it, that is larger than allowed."""
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return ApiError(status, error.message, code=error.code, param=error.param)


def not_found(message: str, code: str, param: str = "id") -> ApiError:
    """Return a 404."""
    return ApiError(HTTPStatus.NOT_FOUND, message, code=code, param=param)


def model_not_found(
    model: str, known: Iterable[str], param: Literal["model", "base"] = "model"
) -> ApiError:
    """Return the 404 for a model that no pool serves.

    Args:
        known: the models that exist, the default one first.
        param: which parameter names it.
    """
    # a gateway may hear later than the dispatcher that this model was removed
    first, *others = [name for name in known if name != model] or ["no other"]
    note = " (taken where 'model' is left out)" if param == "model" else ""
    allowed = ", ".join([f"{first}{note}", *others])
    return not_found(
        f"The model {model[:100]!r} does not exist; allowed: {allowed}.", "model_not_found", param
    )


def model_not_ready(
    model: str, retry_after_s: float = DEFAULT_RETRY_AFTER_S, *, is_deployed: bool = True
) -> ApiError:
    """Return the 503 for a model of which no replica is up."""
    loading = (
        f"The model {model!r} is still loading or has no live replica; try again. Where replicas "
        "are planned, 'ray-cluster plan show' says whether that is paused."
    )
    return unavailable(
        loading if is_deployed else f"The model {not_deployed([repr(model)])}.",
        "model_not_ready",
        param="model",
        retry_after_s=retry_after_s,
    )


def stage_not_ready(lane: str) -> ApiError:
    """Return the 503 for a last stage for which no replica is up."""
    kind, name = split_lane(lane)
    title = KINDS[kind].title
    return unavailable(
        f"The {title} {name!r}, which {kind!r} needs, is still loading or has no live replica; "
        f"try again, or leave out {kind!r} for the image as it is without.",
        f"{title}_not_ready",
        param=kind,
    )


def not_deployed(models: Collection[str]) -> str:
    """Say that models are in the settings, and that nobody has deployed them."""
    verb = "is" if len(models) == 1 else "are"
    return (
        f"{', '.join(models)} {verb} in the settings but not deployed: run 'ray-cluster settings "
        "apply FILE' with the service's configuration"
    )
