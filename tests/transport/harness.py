"""Pairs of ends of every kind, and another process that sends back what it gets."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from ray_cluster.transport.connecting import connect, listen
from ray_cluster.transport.in_process import pair
from ray_cluster.transport.links import Bytes, Link, LinkClosed, LinkKind, LinkLimits

KINDS: tuple[LinkKind, ...] = get_args(LinkKind)
BETWEEN_PROCESSES: tuple[LinkKind, ...] = ("shared-memory", "tcp")
PATIENCE_S = 30.0
SMALL = LinkLimits(max_message_bytes=2**20, room_bytes=2**21)


@contextlib.contextmanager
def ends(kind: LinkKind, limits: LinkLimits | None = None) -> Iterator[tuple[Link, Link]]:
    """Two ends of a link of a kind, in this process; both are closed afterwards."""
    if kind == "in-process":
        here, there = pair(limits)
    else:
        found: queue.Queue[Link] = queue.Queue()
        listener = listen("127.0.0.1", found.put, limits)
        shares_memory = kind == "shared-memory"
        here = connect(listener.target, listener.secret, limits=limits, shares_memory=shares_memory)
        there = found.get(timeout=PATIENCE_S)
        listener.close()
    assert (here.kind, there.kind) == (kind, kind)
    try:
        yield here, there
    finally:
        here.close()
        there.close()


def noise(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def read_all(link: Link) -> None:
    """Read until the link is closed, and raise that."""
    while True:
        link.receive()


class Sending:
    """A thread that calls something, and what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except (LinkClosed, ValueError) as error:
            self.error = error

    def is_done_within(self, timeout_s: float = PATIENCE_S) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class EchoProcess:
    """Another process whose links send every message back, head and frames."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.transport.harness"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.target, self.secret = self._process.stdout.readline().split()

    def connect(self, kind: LinkKind, limits: LinkLimits | None = None) -> Link:
        link = connect(
            self.target, self.secret, limits=limits, shares_memory=kind == "shared-memory"
        )
        assert link.kind == kind
        return link

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _echo(link: Link) -> None:
    with contextlib.suppress(LinkClosed):
        while True:
            message = link.receive()
            link.send(message.head, message.frames)
            message.release()
    link.close()


def _serve() -> None:
    listener = listen("127.0.0.1", _echo)
    sys.stdout.write(f"{listener.target} {listener.secret}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    _serve()
