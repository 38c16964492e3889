"""Links to another process, which is stopped and killed."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_cluster.transport.links import Link, LinkClosed, LinkKind
from tests.transport.harness import BETWEEN_PROCESSES, EchoProcess, Sending, noise, read_all

pytestmark = pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
MIB = 2**20


@pytest.fixture
def echo() -> Iterator[EchoProcess]:
    process = EchoProcess()
    yield process
    process.kill()


def test_large_messages_come_back_bit_for_bit(kind: LinkKind, echo: EchoProcess) -> None:
    link = echo.connect(kind)
    for num_bytes in (110_592, 13 * MIB):
        frames = [noise(num_bytes // 13 + seed, seed) for seed in range(13)]
        link.send(b"residuals", frames)
        message = link.receive()
        assert [one.tobytes() for one in message.frames] == [one.tobytes() for one in frames]
        message.release()
    link.close()


def test_a_stopped_process_goes_on_where_it_was(kind: LinkKind, echo: EchoProcess) -> None:
    link = echo.connect(kind)
    echo.stop()
    count = 2000

    def send() -> None:
        for number in range(count):
            link.send(str(number).encode(), [noise(20_000, number)])

    sending = Sending(send)
    assert not sending.is_done_within(0.5), "it cannot take all of it while it is stopped"
    echo.go_on()
    for number in range(count):
        message = link.receive()
        assert message.head == str(number).encode()
        assert message.frames[0].tobytes() == noise(20_000, number).tobytes()
        message.release()
    assert sending.is_done_within()
    link.close()


@pytest.mark.parametrize("stops_first", [False, True])
def test_who_waits_for_a_killed_process_hears_of_it_and_nothing_is_left(
    kind: LinkKind, stops_first: bool, echo: EchoProcess
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    link = echo.connect(kind)
    with contextlib.closing(link):
        link.send(b"", [noise(MIB)])
        link.receive().release()
        _kill_while_both_wait(link, echo, stops_first=stops_first)
    del link
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert not _own_sockets()
    assert "memfd:ray-cluster" not in Path("/proc/self/maps").read_text()


def _own_sockets() -> list[str]:
    """Return the named sockets of links that this process has; other processes may have some."""
    ends = (os.readlink(path) for path in _descriptors())
    own = {one.removeprefix("socket:[").removesuffix("]") for one in ends}
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if "ray-cluster" in line and line.split()[6] in own]


def _descriptors() -> list[Path]:
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def _kill_while_both_wait(link: Link, echo: EchoProcess, *, stops_first: bool) -> None:
    if stops_first:
        echo.stop()

    def fill() -> None:
        while True:
            link.send(b"x" * 50_000, [noise(MIB)])

    # nothing is released or read here: sooner or later both sides wait
    filling, waiting = Sending(fill), Sending(lambda: read_all(link) if stops_first else None)
    assert not filling.is_done_within(0.5)
    echo.kill()
    assert filling.is_done_within()
    assert isinstance(filling.error, LinkClosed)
    assert waiting.is_done_within()
    with pytest.raises(LinkClosed):
        read_all(link)
