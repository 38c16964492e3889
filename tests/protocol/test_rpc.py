"""Calls over gRPC: answered, refused without the secret, cancelled with their callers."""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from ray_cluster.errors import InvalidRequest
from ray_cluster.protocol.rpc import MAX_MESSAGE_BYTES, RpcAddress, RpcClient, RpcFailed, RpcServer

HOST = "127.0.0.1"


class Target:
    """What is called."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def add(self, one: int, other: int) -> int:
        return one + other

    async def size(self, data: bytes) -> tuple[int, bytes]:
        return len(data), data

    async def fail(self) -> None:
        raise ValueError("no such thing")

    async def refuse(self) -> None:
        raise InvalidRequest("no such size", "size", "unknown")

    async def hang(self) -> None:
        self.entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def hidden(self) -> None:
        raise AssertionError("nobody may call this")


@asynccontextmanager
async def serving(target: Target) -> AsyncIterator[tuple[RpcServer, RpcAddress]]:
    server = RpcServer([target.add, target.size, target.fail, target.refuse, target.hang])
    address = await server.start(HOST)
    try:
        yield server, address
    finally:
        await server.stop()


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[RpcClient]:
    async with serving(target) as (_, address):
        client = RpcClient(address)
        yield client
        await client.close()


async def test_a_call_returns_what_the_method_returns_and_many_go_at_once() -> None:
    async with connected(Target()) as client:
        calls = [client.call("add", one, 1) for one in range(200)]
        assert await asyncio.gather(*calls) == list(range(1, 201))


async def test_a_held_call_holds_up_no_other() -> None:
    target = Target()
    async with connected(target) as client:
        held = asyncio.create_task(client.call("hang"))
        await asyncio.wait_for(target.entered.wait(), 5)
        assert await asyncio.wait_for(client.call("add", 1, 2), 5) == 3
        held.cancel()
        await asyncio.wait_for(target.cancelled.wait(), 5)


async def test_messages_larger_than_grpcs_own_bound_pass_both_ways() -> None:
    data = bytes(20 << 20)
    assert len(data) < MAX_MESSAGE_BYTES
    async with connected(Target()) as client:
        assert await client.call("size", data) == (len(data), data)


async def test_an_error_of_ours_is_raised_for_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(Target()) as client:
        with pytest.raises(InvalidRequest, match="no such size") as caught:
            await client.call("refuse")
    assert (caught.value.param, caught.value.code) == ("size", "unknown")
    assert not caplog.records


async def test_what_a_method_raises_reaches_caller_and_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, logger="ray_cluster.protocol.rpc"):
        async with connected(Target()) as client:
            with pytest.raises(RpcFailed, match="no such thing") as failed:
                await client.call("fail")
    assert not failed.value.is_refused
    assert "fail has failed" in caplog.text


@pytest.mark.parametrize("method", ["hidden", "__init__", "nothing"])
async def test_only_the_methods_named_can_be_called(method: str) -> None:
    async with connected(Target()) as client:
        with pytest.raises(RpcFailed, match="UNIMPLEMENTED"):
            await client.call(method)


def leave(mark: Path) -> bytes:
    mark.touch()
    return b""


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return leave, (self.mark,)


@pytest.mark.parametrize("metadata", [(), (("secret", ""),), (("secret", "x" * 43),)])
async def test_nothing_is_unpickled_that_comes_without_the_secret(
    metadata: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    async with serving(Target()) as (_, address):
        async with grpc.aio.insecure_channel(address.target) as channel:
            ask = channel.unary_unary("/ray_cluster/size")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(pickle.dumps((Trap(mark),)), metadata=metadata)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert not mark.exists()
        await RpcClient(address).call("size", Trap(mark))
        assert mark.exists()


SERVER = """
import asyncio, re, sys
from ray_cluster.protocol.rpc import RpcServer

async def size(data):
    return len(data)

async def serve():
    server = RpcServer([size])
    address = await server.start("127.0.0.1")
    print(address.target, address.secret, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    status = open("/proc/self/status").read()
    print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) // 1024, flush=True)

asyncio.run(serve())
"""


@pytest.mark.parametrize("knows_secret", [False, True])
async def test_a_large_message_without_the_secret_is_not_even_received(knows_secret: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    target, secret = (await process.stdout.readline()).decode().split()
    client = RpcClient(RpcAddress(target, secret if knows_secret else "x"))
    data = bytes(200 << 20)
    if knows_secret:
        assert await client.call("size", data) == len(data)
    else:
        with pytest.raises(RpcFailed, match="UNAUTHENTICATED"):
            await client.call("size", data)
    process.stdin.write(b"\n")
    peak_mib = int(await process.stdout.readline())
    await process.wait()
    await client.close()
    assert (peak_mib > 200) == knows_secret, peak_mib


async def test_a_server_that_is_gone_refuses_also_what_it_held() -> None:
    target = Target()
    async with serving(target) as (server, address):
        client = RpcClient(address)
        held = asyncio.create_task(client.call("hang"))
        await asyncio.wait_for(target.entered.wait(), 5)
        await server.stop()
        calls: list[Awaitable[object]] = [held, client.call("add", 1, 2)]
        for call in calls:
            with pytest.raises(RpcFailed) as failed:
                await asyncio.wait_for(call, 5)
            assert failed.value.is_refused
        await client.close()


async def test_a_taken_port_is_an_error() -> None:
    async with serving(Target()) as (_, address):
        port = int(address.target.rpartition(":")[2])
        with pytest.raises(RuntimeError):
            await RpcServer([]).start(HOST, port)


def test_an_address_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(RpcAddress("h:1", "s3cret"))
