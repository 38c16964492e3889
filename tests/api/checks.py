"""What every reply of the API has to keep to."""

from __future__ import annotations

from typing import Any

import httpx

from ray_cluster.api.output.resource_schemas import ErrorResponse

URL = "/v1/images/generations"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a reply, after checking its form and its retry advice."""
    body = response.json()
    ErrorResponse.model_validate(body, strict=True, extra="forbid")
    assert response.status_code >= 400
    assert response.headers["x-request-id"]
    retryable = response.status_code in {429, 503}
    assert ("retry-after" in response.headers) is retryable
    if retryable:
        assert int(response.headers["retry-after"]) >= 1
    else:
        assert response.headers["x-should-retry"] == "false"
    error: dict[str, Any] = body["error"]
    return error


async def refused(http: httpx.AsyncClient, param: str | None = None, **body: Any) -> str:
    """Post a body that has to be refused with 400; returns the message."""
    response = await http.post(URL, json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert param is None or repr(param) in error["message"]
    return str(error["message"])


def check_error(
    response: httpx.Response, status: int, *, code: str | None = None, param: str | None = None
) -> None:
    """Check that a reply is this error, in the form that all have."""
    assert response.status_code == status, response.text
    error = error_of(response)
    assert code is None or error["code"] == code
    assert param is None or error["param"] == param
