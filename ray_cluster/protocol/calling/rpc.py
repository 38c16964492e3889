"""Calls of an interface's methods in another process of the cell, over gRPC.

Arguments and results travel by the codec. A server accepts only calls with its secret. An error
that a method declares is raised for its caller, too.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from ray_cluster.codec.values import Codec, CodecError
from ray_cluster.errors import RayClusterError
from ray_cluster.protocol.calling.interface import Method, RaisedError, methods_of
from ray_cluster.protocol.leases import Endpoint

logger = logging.getLogger(__name__)

# images travel in messages: ten of the largest in one reply
MAX_MESSAGE_BYTES = 256 << 20

_SERVICE = "ray_cluster"
_SECRET = "secret"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # peers are of one cell: the environment's proxies are for the outer world
    ("grpc.enable_http_proxy", 0),
    # a port in use is an error, and not shared
    ("grpc.so_reuseport", 0),
)

# the first byte of an answer
_RETURNED, _RAISED = b"\0", b"\1"
_RAISED_ERROR: Codec[RaisedError] = Codec(RaisedError)


class RpcFailed(Exception):
    """A call got no answer: nobody is there, or the method has a bug.

    Attributes:
        is_refused: whether the server is gone or is another one by now.
    """

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class RpcServer:
    """Lets others call the methods of some interfaces, each call a task of the running loop.

    A call whose caller cancels it, or is gone, is cancelled.

    Args:
        services: by interface, the object whose methods are called.
    """

    def __init__(self, services: Mapping[type, object]) -> None:
        self._secret = secrets.token_urlsafe(32)
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_handler(method, getattr(service, name)))
            for interface, service in services.items()
            for name, method in methods_of(interface).items()
        }
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=[_SecretCheck(self._secret)])
        generic = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))

    async def start(self, host: str, port: int = 0) -> Endpoint:
        """Listen; port 0 is any that is free.

        Raises:
            RuntimeError: the port is in use, or the host has no such address.
        """
        name = f"[{host}]" if ":" in host else host
        port = self._server.add_insecure_port(f"{name}:{port}")
        await self._server.start()
        return Endpoint(f"{name}:{port}", self._secret)

    async def stop(self) -> None:
        """End all calls, and stop listening."""
        await self._server.stop(grace=None)


class _SecretCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses callers without the secret, before any of their message is read."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        # of a stream nothing is received before it is read
        self._refusal = grpc.stream_unary_rpc_method_handler(self._refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return what answers a call."""
        given = dict(handler_call_details.invocation_metadata or ()).get(_SECRET, "")
        if hmac.compare_digest(str(given).encode(), self._secret):
            return await continuation(handler_call_details)
        return self._refusal

    async def _refuse(self, _messages: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is another server")


def _handler(
    method: Method, function: Callable[..., Awaitable[Any]]
) -> Callable[[bytes, grpc.aio.ServicerContext], Coroutine[Any, Any, bytes]]:
    async def answer(packed: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        try:
            result = await function(*method.arguments.decode(packed))
            return _RETURNED + method.result.encode(result)
        except tuple(method.errors.values()) as error:
            return _RAISED + _RAISED_ERROR.encode(RaisedError(type(error).__name__, error.args))
        except Exception:
            logger.exception("%s has failed", method.name)
            raise

    return answer


class RpcClient:
    """Calls the methods of one server, any number at a time, on one event loop."""

    def __init__(self, address: Endpoint) -> None:
        self._channel = grpc.aio.insecure_channel(address.target, options=_OPTIONS)
        self._metadata = ((_SECRET, address.secret),)

    async def call(self, method: Method, args: tuple[Any, ...]) -> Any:
        """Return what a method returns; cancelling this cancels it there.

        Raises:
            RpcFailed: there is no answer, or none of this version.
            RayClusterError: the method raised it.
        """
        ask = self._channel.unary_unary(f"/{_SERVICE}/{method.name}")
        try:
            answer = await ask(method.arguments.encode(args), metadata=self._metadata)
            return _result(method, answer)
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() in {
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.UNAUTHENTICATED,
            }
            code, details = error.code().name, error.details()
            raise RpcFailed(f"{code}: {details}", is_refused=is_refused) from error
        except CodecError as error:
            raise RpcFailed(str(error), is_refused=False) from error

    async def close(self, grace_s: float = 0.0) -> None:
        """Disconnect; calls that are under way get so many seconds to end."""
        await self._channel.close(grace=grace_s)


def _result(method: Method, answer: bytes) -> Any:
    if answer[:1] == _RETURNED:
        return method.result.decode(answer[1:])
    raised = _RAISED_ERROR.decode(answer[1:])
    error = method.errors.get(raised.name, RayClusterError)
    raise error(*raised.arguments)
