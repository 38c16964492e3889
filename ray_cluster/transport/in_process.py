"""Links between threads of one process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from ray_cluster.transport.links import (
    Bytes,
    Link,
    LinkClosed,
    LinkKind,
    LinkLimits,
    Message,
    Traffic,
)
from ray_cluster.transport.traffic import Meter


def pair(limits: LinkLimits | None = None) -> tuple[Link, Link]:
    """Return the two ends of a link."""
    limits = limits or LinkLimits()
    there, back = _Lane(limits.room_bytes), _Lane(limits.room_bytes)
    return _End(there, back, limits), _End(back, there, limits)


class _Lane:
    """The messages of one direction, and the room that they take."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._used_bytes = 0
        self._messages: deque[Message] = deque()
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, head: bytes, frames: tuple[Bytes, ...], num_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._used_bytes + num_bytes <= self._room_bytes
            )
            if self._is_closed:
                raise LinkClosed("the other side has closed the link, or this one")
            self._used_bytes += num_bytes
            self._messages.append(Message(head, frames, lambda: self._free(num_bytes)))
            self._changed.notify_all()

    def get(self) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._messages)
            if not self._messages:
                raise LinkClosed("the other side has closed the link, or this one")
            return self._messages.popleft()

    def close(self, *, drop: bool = False) -> None:
        with self._changed:
            self._is_closed = True
            if drop:
                self._messages.clear()
            self._changed.notify_all()

    def _free(self, num_bytes: int) -> None:
        with self._changed:
            self._used_bytes -= num_bytes
            self._changed.notify_all()


class _End:
    """One end: frames are copied once, by the sender."""

    kind: LinkKind = "in-process"

    def __init__(self, outbox: _Lane, inbox: _Lane, limits: LinkLimits) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._limits = limits
        self._meter = Meter()

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def send(self, head: bytes, frames: Sequence[Bytes] = ()) -> None:
        started_s = time.perf_counter()
        num_bytes = self._limits.check(head, frames)
        self._outbox.put(head, tuple(_copied(one) for one in frames), num_bytes)
        self._meter.sent(len(head) + num_bytes, time.perf_counter() - started_s)

    def receive(self) -> Message:
        message = self._inbox.get()
        self._meter.received(len(message.head) + sum(one.nbytes for one in message.frames))
        return message

    def close(self) -> None:
        self._outbox.close()
        self._inbox.close(drop=True)


def _copied(frame: Bytes) -> Bytes:
    copy = np.array(frame)
    copy.flags.writeable = False
    return copy
