"""Calls over gRPC: answered, refused without the secret, cancelled with their callers."""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc
import pytest

from ray_cluster.codec.values import Codec
from ray_cluster.errors import InvalidRequest
from ray_cluster.protocol.calling.interface import methods_of, raises, stub
from ray_cluster.protocol.calling.rpc import MAX_MESSAGE_BYTES, RpcClient, RpcFailed, RpcServer
from ray_cluster.protocol.leases import Endpoint

HOST = "127.0.0.1"


class Calls(Protocol):
    """What may be called."""

    async def add(self, one: int, other: int = 1) -> int: ...

    async def size(self, data: bytes) -> tuple[int, bytes]: ...

    async def fail(self) -> None: ...

    @raises(InvalidRequest)
    async def refuse(self) -> None: ...

    async def hang(self) -> None: ...


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
async def serving(target: Target) -> AsyncIterator[tuple[RpcServer, Endpoint]]:
    server = RpcServer({Calls: target})
    address = await server.start(HOST)
    try:
        yield server, address
    finally:
        await server.stop()


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Calls]:
    async with serving(target) as (_, address):
        client = RpcClient(address)
        yield stub(Calls, client.call)
        await client.close()


async def test_a_call_returns_what_the_method_returns_and_many_go_at_once() -> None:
    async with connected(Target()) as client:
        calls = [client.add(one, 1) for one in range(200)]
        assert await asyncio.gather(*calls) == list(range(1, 201))


async def test_a_held_call_holds_up_no_other() -> None:
    target = Target()
    async with connected(target) as client:
        held = asyncio.create_task(client.hang())
        await asyncio.wait_for(target.entered.wait(), 5)
        assert await asyncio.wait_for(client.add(1, 2), 5) == 3
        held.cancel()
        await asyncio.wait_for(target.cancelled.wait(), 5)


async def test_messages_larger_than_grpcs_own_bound_pass_both_ways() -> None:
    data = bytes(20 << 20)
    assert len(data) < MAX_MESSAGE_BYTES
    async with connected(Target()) as client:
        assert await client.size(data) == (len(data), data)


async def test_an_error_of_ours_is_raised_for_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(Target()) as client:
        with pytest.raises(InvalidRequest, match="no such size") as caught:
            await client.refuse()
    assert (caught.value.param, caught.value.code) == ("size", "unknown")
    assert not caplog.records


async def test_what_a_method_raises_reaches_caller_and_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, logger="ray_cluster.protocol.calling.rpc"):
        async with connected(Target()) as client:
            with pytest.raises(RpcFailed, match="no such thing") as failed:
                await client.fail()
    assert not failed.value.is_refused
    assert "fail has failed" in caplog.text


@pytest.mark.parametrize("method", ["hidden", "__init__", "nothing"])
async def test_only_the_methods_of_the_interface_can_be_called(method: str) -> None:
    async with serving(Target()) as (_, address):
        client = RpcClient(address)
        with pytest.raises(RpcFailed, match="UNIMPLEMENTED"):
            await client.call(replace(methods_of(Calls)["hang"], name=method), ())
        await client.close()


async def test_parameters_may_be_named_or_left_to_their_defaults() -> None:
    async with connected(Target()) as client:
        assert await client.add(other=5, one=2) == 7
        assert await client.add(2) == 3
        for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"third": 3})):
            with pytest.raises(TypeError, match="add takes one, other"):
                await client.add(*args, **kwargs)  # type: ignore[arg-type]


class OtherCalls(Protocol):
    """The same names in another version."""

    async def add(self, one: str) -> int: ...


async def test_what_another_version_sends_or_answers_is_refused_by_both_sides() -> None:
    async with serving(Target()) as (_, address):
        client = RpcClient(address)
        other: OtherCalls = stub(OtherCalls, client.call)
        with pytest.raises(RpcFailed, match="no value of"):
            await other.add("one")
        method = methods_of(Calls)["add"]
        asks_for_text = replace(method, result=Codec[object](str))
        with pytest.raises(RpcFailed, match="Expected `str`"):
            await client.call(asks_for_text, (1, 2))
        await client.close()


def leave(mark: Path) -> bytes:
    mark.touch()
    return b""


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return leave, (self.mark,)


@pytest.mark.parametrize("knows_secret", [False, True])
async def test_nothing_is_ever_unpickled(knows_secret: bool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    trap = pickle.dumps((Trap(mark),))
    async with serving(Target()) as (_, address):
        metadata = (("secret", address.secret if knows_secret else "x" * 43),)
        async with grpc.aio.insecure_channel(address.target) as channel:
            for data in (trap, b"\1" + bytes(4) + trap):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/ray_cluster/size")(data, metadata=metadata)
                is_refused = refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert is_refused is not knows_secret
    assert not mark.exists()
    # the trap itself works
    pickle.loads(trap)
    assert mark.exists()


class Sizes(Protocol):
    async def size(self, data: bytes) -> int: ...


SERVER = """
import asyncio, re, sys
from ray_cluster.protocol.leases import Endpoint
from ray_cluster.protocol.calling.rpc import RpcServer
from tests.protocol.test_rpc import Sizes

class Target:
    async def size(self, data):
        return len(data)

async def serve():
    server = RpcServer({Sizes: Target()})
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
    client = RpcClient(Endpoint(target, secret if knows_secret else "x"))
    sizes: Sizes = stub(Sizes, client.call)
    data = bytes(200 << 20)
    if knows_secret:
        assert await sizes.size(data) == len(data)
    else:
        with pytest.raises(RpcFailed, match="UNAUTHENTICATED"):
            await sizes.size(data)
    process.stdin.write(b"\n")
    peak_mib = int(await process.stdout.readline())
    await process.wait()
    await client.close()
    assert (peak_mib > 200) == knows_secret, peak_mib


async def test_a_server_that_is_gone_refuses_also_what_it_held() -> None:
    target = Target()
    async with serving(target) as (server, address):
        client = RpcClient(address)
        calls: Calls = stub(Calls, client.call)
        held = asyncio.create_task(calls.hang())
        await asyncio.wait_for(target.entered.wait(), 5)
        await server.stop()
        for call in (held, calls.add(1, 2)):
            with pytest.raises(RpcFailed) as failed:
                await asyncio.wait_for(call, 5)
            assert failed.value.is_refused
        await client.close()


async def test_a_taken_port_is_an_error() -> None:
    async with serving(Target()) as (_, address):
        port = int(address.target.rpartition(":")[2])
        with pytest.raises(RuntimeError):
            await RpcServer({}).start(HOST, port)


def test_an_address_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(Endpoint("h:1", "s3cret"))
