"""The dispatcher, for gateways and replicas: Serve finds it, and calls go to it directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

from grpc import RpcError  # type: ignore[import-untyped]
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ray_cluster.deployments.serve.deploy_file import FRONT
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.calling.interface import Method, stub
from ray_cluster.protocol.calling.rpc import RpcClient, RpcFailed
from ray_cluster.protocol.calling.timeouts import within
from ray_cluster.protocol.controller import ControlCalls
from ray_cluster.protocol.dispatcher import DispatcherClient, DispatcherLink
from ray_cluster.protocol.leases import Endpoint

# longer than any call is held
_GRACE_S = 30.0

DISPATCHER = "Dispatcher"


def ask_dispatcher(method: str, *args: object, timeout_s: float) -> Any:
    """Call the dispatcher through Serve, from a process that has no event loop.

    Raises:
        RayError, RayServeException, TimeoutError: it does not answer, or the call failed.
    """
    handle = serve.get_deployment_handle(DISPATCHER, FRONT)
    return getattr(handle, method).remote(*args).result(timeout_s=timeout_s)


class DispatcherHandle:
    """Calls the cell's dispatcher; a call that gets no answer raises DispatcherUnavailable.

    Only its address is asked for through Serve, once in the life of a dispatcher: a call through
    Serve costs both ends some milliseconds of CPU time, and a request takes three.

    Attributes:
        client: what a gateway calls.
        link: what a replica calls.
        control: what the controller calls.

    Args:
        patience_s: longest wait for an answer beyond what a long poll is held.
    """

    def __init__(self, *, patience_s: float) -> None:
        self.client: DispatcherClient = stub(DispatcherClient, self._call)
        self.link: DispatcherLink = stub(DispatcherLink, self._call)
        self.control: ControlCalls = stub(ControlCalls, self._call)
        self._patience_s = patience_s
        self._handle: DeploymentHandle[Any] | None = None
        self._client: RpcClient | None = None
        self._finding = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def _call(self, method: Method, args: tuple[Any, ...]) -> Any:
        client: RpcClient | None = None
        try:
            client = await self._connected()
            held_s = method.held_s(args)
            return await within(held_s + self._patience_s, client.call(method, args))
        except RpcFailed as error:
            if error.is_refused:
                self._leave(client)
            raise DispatcherUnavailable(f"{method.name}: {error}") from error
        except (RayError, RayServeException, RpcError, TimeoutError) as error:
            self._leave(client)
            raise DispatcherUnavailable(
                f"{method.name}: {type(error).__name__}: {error}"
            ) from error

    async def _connected(self) -> RpcClient:
        if self._client is not None:
            return self._client
        return await within(self._patience_s, self._find())

    async def _find(self) -> RpcClient:
        async with self._finding:
            if self._client is None:
                if self._handle is None:
                    # over gRPC: by reference, Ray blocks the dispatcher's event loop at the end
                    # of every call until the caller has acknowledged it, so that one frozen
                    # caller would stop the whole cell
                    handle = serve.get_deployment_handle(DISPATCHER, FRONT)
                    self._handle = handle.options(_by_reference=False)
                address = await cast(Awaitable[Endpoint], self._handle.address.remote())
                self._client = RpcClient(address)
            return self._client

    def _leave(self, client: RpcClient | None) -> None:
        """Ask for the dispatcher's address again: it may be another one by now."""
        if client is None or client is not self._client:
            return
        self._client = None
        # other calls may yet be answered
        task = asyncio.create_task(client.close(_GRACE_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
