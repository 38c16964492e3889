"""A running service through its HTTP API: a method per call, and why there is no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx
import typer
from pydantic import BaseModel
from rich.console import Console

from ray_cluster.api.call_reader import IDEMPOTENCY_KEY
from ray_cluster.api.output.resource_schemas import (
    ControlNetList,
    ErrorDetail,
    ErrorResponse,
    JobList,
    JobResponse,
    LoraList,
    LoraResponse,
    ModelCard,
    ModelList,
)
from ray_cluster.api.routes.plan import PlanResponse
from ray_cluster.cli.output import command, complain, stdout, warn
from ray_cluster.config.loading import ClusterConfig, environment_key
from ray_cluster.errors import ConfigError, InvalidRequest, RayClusterError
from ray_cluster.protocol.jobs import JobState

ReplyT = TypeVar("ReplyT", bound=BaseModel)

_CONNECT_S = 10.0
_ANSWER_S = 30.0
_PAGE = 100
_LORA_PAGE = 1000
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class ServiceFailed(RayClusterError):
    """The service refused a call or failed on it, in its own words."""


class NoAnswer(ServiceFailed):
    """The same call, made again, may succeed.

    Attributes:
        kind: ``away``: nothing is there; ``lost``: whether the call was taken is not known;
            ``not yet``: it was refused for now.
    """

    def __init__(self, message: str, kind: Literal["away", "lost", "not yet"]) -> None:
        super().__init__(message)
        self.kind = kind


class RemoteService:
    """A service at a URL. A call raises InvalidRequest, NoAnswer or ServiceFailed.

    Args:
        url: as ``serve`` prints it, with or without ``/v1``.
        api_key: sent with every call; None sends none.
        answer_s: longest wait for one answer.
        transport: carries calls to a service that is not on the network.

    Attributes:
        base: its address, without the API's path.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        answer_s: float = _ANSWER_S,
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base = _base_of(url)
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(min(answer_s, _ANSWER_S), connect=_CONNECT_S)
        self._http = httpx.Client(headers=self.headers, timeout=timeout, transport=transport)

    @classmethod
    def at(
        cls, url: str, api_key: str | None, config: ClusterConfig, answer_s: float = _ANSWER_S
    ) -> RemoteService:
        """Return the service at a URL.

        Args:
            api_key: None for the environment's; without one, for the first plain key of the
                configuration, which goes to this machine only.
        """
        if api_key is None:
            api_key = environment_key()
        if api_key is None and httpx.URL(_base_of(url)).host in _LOOPBACK:
            api_key = next((one.plain for one in config.http.api_keys if one.plain), None)
        return cls(url, api_key, answer_s)

    def __enter__(self) -> RemoteService:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[ModelCard]:
        """Return the models that are ready, without those that are others with a LoRA."""
        listed = self._ask(ModelList, "GET", "/v1/models").data
        return [one for one in listed if isinstance(one, ModelCard)]

    def create_job(self, body: Mapping[str, Any], key: str) -> JobResponse:
        """Return the new job of a call, or the one that its key has named before."""
        headers = {IDEMPOTENCY_KEY: key}
        return self._ask(JobResponse, "POST", "/v1/jobs", json=dict(body), headers=headers)

    def job(self, job_id: str) -> JobResponse:
        """Return a job as it is now."""
        return self._ask(JobResponse, "GET", _job_path(job_id))

    def cancel_job(self, job_id: str) -> JobResponse:
        """End a job, unless it has ended; return it."""
        return self._ask(JobResponse, "DELETE", _job_path(job_id))

    def jobs(self, state: JobState | None = None, limit: int | None = None) -> list[JobResponse]:
        """Return jobs, the newest first: all of them without a limit."""
        found: list[JobResponse] = []
        params: dict[str, Any] = {} if state is None else {"state": state}
        while True:
            params["limit"] = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = self._ask(JobList, "GET", "/v1/jobs", params=params)
            found += page.data
            if not page.has_more or len(found) == limit:
                return found
            params["after"] = page.last_id

    def loras(self, limit: int | None = None) -> list[LoraResponse]:
        """Return LoRAs by name: all of them without a limit."""
        found: list[LoraResponse] = []
        params: dict[str, Any] = {}
        while True:
            params["limit"] = _LORA_PAGE if limit is None else min(_LORA_PAGE, limit - len(found))
            page = self._ask(LoraList, "GET", "/v1/loras", params=params)
            found += page.data
            if not page.has_more or len(found) == limit:
                return found
            params["after"] = page.last_id

    def add_lora(self, body: Mapping[str, Any]) -> LoraResponse:
        """Register a LoRA, unless it is; return it."""
        return self._ask(LoraResponse, "POST", "/v1/loras", json=dict(body))

    def remove_lora(self, name: str) -> LoraResponse:
        """Remove a LoRA; return it as it is now."""
        return self._ask(LoraResponse, "DELETE", f"/v1/loras/{quote(name, safe='')}")

    def controlnets(self) -> ControlNetList:
        """Return the ControlNets and the detectors."""
        return self._ask(ControlNetList, "GET", "/v1/controlnets")

    def plan(self) -> PlanResponse:
        """Return the controller's plan."""
        return self._ask(PlanResponse, "GET", "/v1/plan")

    def pause_plan(self, *, is_paused: bool) -> PlanResponse:
        """Pause the controller, or let it act again."""
        return self._ask(PlanResponse, "POST", f"/v1/plan/{'pause' if is_paused else 'resume'}")

    def file(self, url: str) -> bytes:
        """Return the coded image that a reply links to."""
        # at the address that is known to lead there; links may have another, under another path
        path = httpx.URL(url).path
        return self._call("GET", path[max(0, path.rfind("/v1/")) :]).content

    def _ask(self, form: type[ReplyT], method: str, path: str, **options: Any) -> ReplyT:
        reply = self._call(method, path, **options)
        try:
            return form.model_validate_json(reply.content)
        except ValueError as error:
            raise ServiceFailed(_not_ours(reply)) from error

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            reply = self._http.request(method, self.base + path, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise NoAnswer(
                f"{self.base} cannot be reached ({error}); give the service's address with --url, "
                f"or start it with '{command()} serve'",
                "away",
            ) from error
        except httpx.TimeoutException as error:
            raise NoAnswer(f"{self.base} did not answer in time", "lost") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise NoAnswer(f"the connection to {self.base} was lost ({why})", "lost") from error
        if not reply.is_success:
            raise _error_of(reply)
        return reply


def _base_of(url: str) -> str:
    """Return the service's address without the API's path."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ConfigError(f"--url {url!r} is no URL; give one like http://127.0.0.1:8000")
    return base


def _error_of(reply: httpx.Response) -> RayClusterError:
    """Return an answer other than success, in OpenAI's form or not, as one of our errors."""
    try:
        error = ErrorResponse.model_validate_json(reply.content).error
    except ValueError:
        text = _not_ours(reply)
        # a proxy in front of a gateway that has died answers so
        return NoAnswer(text, "lost") if reply.is_server_error else ServiceFailed(text)
    if error.code == "dispatcher_unavailable":
        return NoAnswer(error.message, "lost")
    if reply.is_server_error and reply.headers.get("x-should-retry") == "true":
        return NoAnswer(error.message, "not yet")
    return error_from(error)


def error_from(error: ErrorDetail) -> RayClusterError:
    """Return an error of the API as one of ours."""
    if error.param is not None:
        return InvalidRequest(error.message, error.param, error.code or "invalid_value")
    gives = "--api-key or RAY_CLUSTER_API_KEY gives"
    if error.code == "role_missing":
        return ServiceFailed(f"{error.message} ({gives} another one here)")
    if error.code == "invalid_api_key":
        hint = f"{gives} one here, or --config a configuration with a plain one"
        return ServiceFailed(f"{error.message} ({hint})")
    return ServiceFailed(error.message)


def _not_ours(reply: httpx.Response) -> str:
    return (
        f"{reply.url} answered {reply.status_code} {reply.reason_phrase}, and not as "
        "ray-cluster does; is it another service?"
    )


def _job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


AnswerT = TypeVar("AnswerT")

_AGAIN_S = 0.5


def ask_again(
    call: Callable[[], AnswerT], *, until_s: float, console: Console, is_known: bool = True
) -> AnswerT:
    """Repeat a call while there is no answer, and say so once; return the answer.

    Args:
        until_s: when to give up, by ``time.monotonic``.
        console: where a lost connection is reported.
        is_known: whether the service has answered before. Until it has been reached, a service
            that is not there, or that refuses for now, is not waited for.

    Raises:
        NoAnswer: until then, or from an unknown service.
    """
    has_warned = False
    while True:
        try:
            answer = call()
        except NoAnswer as error:
            is_known = is_known or error.kind == "lost"
            if not is_known or time.monotonic() + _AGAIN_S > until_s:
                raise
            if not has_warned:
                warn(f"{error}; trying again", console)
            has_warned = True
        else:
            if has_warned:
                console.print("the service answers again")
            return answer
        time.sleep(_AGAIN_S)


def do_each(names: Sequence[str], do: Callable[[str], str]) -> None:
    """Do something to each of several, and print what it returns.

    Those that are refused are named, and the command leaves with code 1 at the end; without an
    answer it ends at once.
    """
    is_bad = False
    for name in names:
        try:
            said = do(name)
        except NoAnswer:
            raise
        except (InvalidRequest, ServiceFailed) as error:
            complain(str(error))
            is_bad = True
            continue
        stdout().print(said, markup=False)
    if is_bad:
        raise typer.Exit(1)
