"""A small body comes along with its request; every other request is left as it was."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from ray._common.utils import import_attr
from starlette.types import Message, Receive, Scope, Send

from ray_cluster.config.sections.cell_wide import RayConfig
from ray_cluster.deployments.serve.early_body import EarlyBodyReader, EarlyBodySender
from ray_cluster.deployments.serve.proxy_headers import CommandFilter
from ray_cluster.deployments.serve.ray_environment import apply_ray_environment

BODY = b'{"prompt": "a red circle"}'
DISCONNECT = {"type": "http.disconnect"}


def scope_of(length: int | None = len(BODY), method: str = "POST") -> Scope:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return {"type": "http", "method": method, "headers": headers, "extensions": {"tls": {}}}


def chunk(body: bytes, more_body: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


class Client:
    """What a server hears of one client: messages, each after a wait in seconds."""

    def __init__(self, *messages: tuple[float, Message]) -> None:
        self._messages = list(messages)
        self.num_asked = 0

    async def receive(self) -> Message:
        self.num_asked += 1
        if not self._messages:
            await asyncio.Event().wait()
        wait_s, message = self._messages.pop(0)
        await asyncio.sleep(wait_s)
        return message


async def send(message: Message) -> None:
    raise AssertionError(f"nobody should send {message}")


class Seen:
    """What an application behind a middleware sees of one request."""

    def __init__(self, num_messages: int) -> None:
        self._num_messages = num_messages
        self.scope: Scope = {}
        self.messages: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.messages = [await receive() for _ in range(self._num_messages)]


def through_sender(client: Client, scope: Scope, num_messages: int) -> Seen:
    seen = Seen(num_messages)
    asyncio.run(EarlyBodySender(seen)(scope, client.receive, send))
    return seen


def through_reader(client: Client, scope: Scope, num_messages: int) -> Seen:
    seen = Seen(num_messages)
    asyncio.run(EarlyBodyReader(seen)(scope, client.receive, send))
    return seen


def test_the_gateway_has_the_body_before_it_asks_and_hears_of_the_end() -> None:
    sent = through_sender(Client((0, chunk(BODY)), (0, DISCONNECT)), scope_of(), 2)
    assert sent.messages == [chunk(BODY), DISCONNECT]
    # as Serve does, on the way to the gateway
    scope = pickle.loads(pickle.dumps(sent.scope))
    asked = Client((0, chunk(BODY[:5], more_body=True)), (0, chunk(BODY[5:])), (0, DISCONNECT))
    assert through_reader(asked, scope, 1).messages == [chunk(BODY)]
    assert asked.num_asked == 0
    assert through_reader(asked, scope, 2).messages == [chunk(BODY), DISCONNECT]
    assert scope["extensions"]["tls"] == {}


def is_early(seen: Seen) -> bool:
    client = Client((0, chunk(b"asked for")))
    return through_reader(client, seen.scope, 1).messages != [chunk(b"asked for")]


@pytest.mark.parametrize(
    "messages",
    [
        [(0.3, chunk(BODY)), (0, DISCONNECT)],
        [(0, chunk(BODY[:9], more_body=True)), (0.1, chunk(BODY[9:])), (0, DISCONNECT)],
        [(0, DISCONNECT)],
    ],
    ids=["slow", "in pieces", "client gone"],
)
def test_what_is_not_there_at_once_is_left_to_the_gateway(
    messages: list[tuple[float, Message]],
) -> None:
    seen = through_sender(Client(*messages), scope_of(), len(messages))
    assert seen.messages == [message for _, message in messages]
    assert not is_early(seen)


@pytest.mark.parametrize(
    "scope",
    [
        scope_of(None),
        scope_of(0),
        scope_of(64 * 1024 + 1),
        {**scope_of(), "type": "websocket"},
        {**scope_of(), "headers": [(b"content-length", b"nonsense")]},
        {**scope_of(), "headers": [(b"content-length", b"9" * 4301)]},
    ],
    ids=["unknown length", "empty", "large", "websocket", "nonsense", "4301 digits"],
)
def test_requests_without_a_small_body_are_not_waited_for(scope: Scope) -> None:
    client = Client((0, chunk(BODY)))
    seen = through_sender(client, scope, 0)
    assert client.num_asked == 0
    assert seen.scope is scope
    assert not is_early(seen)


def test_a_handler_that_ends_early_leaves_no_task() -> None:
    async def run() -> set[asyncio.Task[Any]]:
        client = Client((60.0, chunk(BODY)))
        await EarlyBodySender(Seen(0))(scope_of(), client.receive, send)
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(run()) == set()


def test_ray_serves_proxy_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    environ: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environ)
    apply_ray_environment(RayConfig())
    assert [one.cls for one in import_attr(environ[name])()] == [EarlyBodySender, CommandFilter]


def test_commands_to_serve_and_ids_that_the_gateway_would_not_take_are_left_out() -> None:
    kept = [(b"x-request-id", b"a-1"), (b"content-type", b"\xff"), (b"traceparent", b"00-0a-0b-01")]
    dropped = [
        (b"x-request-id", b"\xff"),
        (b"x-request-id", b"a b"),
        (b"x-request-timeout-seconds", b"0.001"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-session-id", b"\xff"),
        (b"serve-multiplexed-model-id", b"\xff"),
        (b"serve_multiplexed_model_id", b"a"),
        (b"traceparent", b"\xff"),
    ]
    seen = Seen(0)
    scope = {**scope_of(None), "headers": [*dropped, *kept]}
    asyncio.run(CommandFilter(seen)(scope, Client().receive, send))
    assert seen.scope["headers"] == kept
