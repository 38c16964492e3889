"""Links over TCP: heads and frames as they are, after a header with their lengths."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence

from ray_cluster.transport.lifetime import Lifetime
from ray_cluster.transport.links import (
    MAX_FRAMES,
    MAX_HEAD_BYTES,
    Bytes,
    LinkClosed,
    LinkKind,
    LinkLimits,
    Message,
    Traffic,
)
from ray_cluster.transport.memory import Buffers, Places, without_bytes
from ray_cluster.transport.traffic import Meter

_MAGIC = b"rclm"
# magic, bytes of the head, number of frames
_HEADER = struct.Struct("!4sII")
_KEPT_BUFFERS = 2
# a peer whose machine is gone, or that has taken nothing for so long
_DEAD_AFTER_S = 30


class TcpLink:
    """One end of a connection; sends from several threads take turns.

    Args:
        connection: past its handshake; the link's own from now on.
    """

    kind: LinkKind = "tcp"

    def __init__(self, connection: socket.socket, limits: LinkLimits) -> None:
        self._socket = connection
        self._limits = limits
        self._order = threading.Lock()
        self._buffers = Buffers(_KEPT_BUFFERS)
        self._meter = Meter()
        self._life = Lifetime(self._wake, connection.close)
        connection.settimeout(None)
        _tune(connection)

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def send(self, head: bytes, frames: Sequence[Bytes] = ()) -> None:
        started_s = time.perf_counter()
        num_bytes = self._limits.check(head, frames)
        sizes = struct.pack(f"!{len(frames)}Q", *(one.nbytes for one in frames))
        header = _HEADER.pack(_MAGIC, len(head), len(frames)) + sizes + head
        with self._life.use(), self._order:
            self._send_all([memoryview(header), *(one.data for one in frames if one.size)])
        self._meter.sent(len(head) + num_bytes, time.perf_counter() - started_s)

    def receive(self) -> Message:
        with self._life.use():
            magic, head_bytes, num_frames = _HEADER.unpack(self._read(_HEADER.size))
            if magic != _MAGIC or head_bytes > MAX_HEAD_BYTES or num_frames > MAX_FRAMES:
                raise LinkClosed("the other side has sent what is no message")
            rest = self._read(8 * num_frames + head_bytes)
            sizes = struct.unpack_from(f"!{num_frames}Q", rest)
            if sum(sizes) > self._limits.max_message_bytes:
                raise LinkClosed(
                    f"the other side sends {sum(sizes)} bytes; at most "
                    f"{self._limits.max_message_bytes} are accepted"
                )
            message = self._frames(rest[8 * num_frames :], sizes)
        self._meter.received(head_bytes + sum(sizes))
        return message

    def close(self) -> None:
        self._life.end()

    def _frames(self, head: bytes, sizes: Sequence[int]) -> Message:
        places = Places.of(sizes)
        if not places.num_bytes:
            return without_bytes(head, len(sizes))
        buffer = self._buffers.take(places.num_bytes)
        frames = []
        for offset, size in zip(places.offsets, sizes, strict=True):
            frame = buffer[offset : offset + size]
            self._read_into(frame.data)
            frame.flags.writeable = False
            frames.append(frame)
        return Message(head, tuple(frames), lambda: self._buffers.give(buffer))

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if sent:
                parts[0] = parts[0][sent:]

    def _read(self, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        self._read_into(memoryview(found))
        return bytes(found)

    def _read_into(self, place: memoryview) -> None:
        while place:
            got = self._socket.recv_into(place, 0, socket.MSG_WAITALL)
            if not got:
                raise LinkClosed("the other side is gone")
            place = place[got:]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _tune(connection: socket.socket) -> None:
    """Send at once, and notice within half a minute when the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": 1000 * _DEAD_AFTER_S,
    }
    for name, value in options.items():
        # macOS has not all of them
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
