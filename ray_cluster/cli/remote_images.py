"""Images from a running service, through its HTTP API."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ray_cluster.api.schema import ErrorResponse, ImagesResponse, ModelCard, ModelList
from ray_cluster.cli.commands import command
from ray_cluster.cli.made import GenerateFailed, MadeImage, MadeImages
from ray_cluster.config import ClusterConfig
from ray_cluster.errors import ConfigError, InvalidRequest, RayClusterError

_CONNECT_S = 10.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class RemoteService:
    """A service at a URL.

    Args:
        url: as ``serve`` prints it, with or without ``/v1``.
        api_key: sent with every call; None sends none.
        timeout_s: longest wait for an answer.

    Attributes:
        headers: sent with every call.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._base = base_of(url)
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)

    @classmethod
    def at(
        cls, url: str, api_key: str | None, config: ClusterConfig, timeout_s: float
    ) -> RemoteService:
        """Return the service at a URL; the configuration's own key goes to this machine only."""
        keys = config.http.api_keys
        if api_key is None and keys and is_this_machine(url):
            api_key = keys[0].get_secret_value()
        return cls(url, api_key, timeout_s)

    def generate(self, body: Mapping[str, Any], console: Console) -> MadeImages:
        """Have images made, with the elapsed time on the console.

        Raises:
            InvalidRequest: a parameter is wrong.
            GenerateFailed: the service cannot be reached, is full, or failed.
        """
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as progress:
            progress.add_task(f"waiting for {self._base}", total=None)
            content = self._call("POST", "/v1/images/generations", body)
        reply = ImagesResponse.model_validate(content)
        return MadeImages(
            model=reply.model,
            size=reply.size,
            images=tuple(
                MadeImage(binascii.a2b_base64(item.b64_json), item.seed, item.timing.model_dump())
                for item in reply.data
            ),
            elapsed_s=reply.deadline.elapsed_s,
            deadline_met=reply.deadline.met,
        )

    def models(self) -> list[ModelCard]:
        """Return the models that are ready; errors as of :meth:`generate`."""
        return ModelList.model_validate(self._call("GET", "/v1/models")).data

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        url = self._base + path
        try:
            reply = httpx.request(
                method, url, json=body, headers=self.headers, timeout=self._timeout
            )
        except httpx.TimeoutException as error:
            raise GenerateFailed(
                f"{self._base} did not answer in time; wait longer with --timeout"
            ) from error
        except httpx.HTTPError as error:
            raise GenerateFailed(
                f"{self._base} cannot be reached ({error}); start the service with "
                f"'{command()} serve', or leave --url out to make the image in this process"
            ) from error
        if not reply.is_success:
            raise _error_of(reply)
        return reply.json()


def base_of(url: str) -> str:
    """Return the service's address without the API's path; ConfigError if it is none."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ConfigError(f"--url {url!r} is no URL; give one like http://127.0.0.1:8000")
    return base


def is_this_machine(url: str) -> bool:
    """Whether a URL leads to this machine."""
    return httpx.URL(base_of(url)).host in _LOOPBACK


def _error_of(reply: httpx.Response) -> RayClusterError:
    """Return what an answer other than success says, in OpenAI's form or not."""
    try:
        error = ErrorResponse.model_validate(reply.json()).error
    except ValueError:
        return GenerateFailed(
            f"{reply.url} answered {reply.status_code} {reply.reason_phrase}, and not as "
            "ray-cluster does; is it another service?"
        )
    if error.param is not None:
        return InvalidRequest(error.message, error.param, error.code or "invalid_value")
    return GenerateFailed(error.message)
