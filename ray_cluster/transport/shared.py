"""Links through memory that two processes of one node share.

Heads and the places of frames go through a Unix socket that keeps messages apart; frames are
copied once, into the sender's arena, and read there. The reader gives blocks back by writing their
numbers into a pipe of the sender's: it holds more of them than there are blocks, so giving back
never waits, and a reading thread may do it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.transport.arena import Arena, Block, Taken, mapped
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
from ray_cluster.transport.memory import Places, without_bytes
from ray_cluster.transport.traffic import Meter

_MESSAGE, _ADDED, _DROPPED = 1, 2, 3
# what it is, number of the block, of the segment, of frames, offset of the block
_PLACE = struct.Struct("=BQIIQ")
# what it is, number of the segment, its bytes
_SEGMENT = struct.Struct("=BIQ")
_NUMBER = struct.Struct("=Q")
# a pipe holds a page at least, which is more numbers than this
_MAX_UNRELEASED = 256
_MOST_BYTES = _PLACE.size + 8 * MAX_FRAMES + MAX_HEAD_BYTES
_DESCRIPTORS = socket.CMSG_SPACE(4 * 4)
_CUT = socket.MSG_TRUNC | socket.MSG_CTRUNC


@dataclass(frozen=True, slots=True)
class Pipes:
    """Ends of two pipes, for numbers of blocks.

    Attributes:
        given_back: tells of this side's blocks.
        give_back: for the other side's.
    """

    given_back: int
    give_back: int

    def close(self) -> None:
        """Close both."""
        os.close(self.given_back)
        os.close(self.give_back)


class SharedLink:
    """One end; sends from several threads take turns.

    Args:
        connection: a Unix socket of type SOCK_SEQPACKET, past its handshake; the link's own, like
            the pipes, from now on.
    """

    kind: LinkKind = "shared-memory"

    def __init__(self, connection: socket.socket, pipes: Pipes, limits: LinkLimits) -> None:
        self._socket = connection
        self._pipes = pipes
        self._limits = limits
        # for what rounding up adds
        self._room_bytes = limits.room_bytes + Places.of([1] * MAX_FRAMES).num_bytes
        self._arena = Arena(self._room_bytes)
        self._order = threading.Lock()
        self._taken: dict[int, Block] = {}
        self._num_blocks = 0
        self._segments: dict[int, Bytes] = {}
        self._packet = bytearray(_MOST_BYTES)
        self._meter = Meter()
        self._life = Lifetime(self._wake, self._free)
        connection.settimeout(None)
        os.set_blocking(pipes.given_back, False)

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def send(self, head: bytes, frames: Sequence[Bytes] = ()) -> None:
        started_s = time.perf_counter()
        num_bytes = self._limits.check(head, frames)
        sizes = [one.nbytes for one in frames]
        places = Places.of(sizes)
        with self._life.use(), self._order:
            number, block = self._block(places.num_bytes)
            if places.num_bytes:
                memory = self._arena.at(block)
                for offset, frame in zip(places.offsets, frames, strict=True):
                    memory[offset : offset + frame.nbytes] = frame
            place = _PLACE.pack(_MESSAGE, number, block.segment, len(sizes), block.offset)
            self._socket.sendmsg([place, struct.pack(f"={len(sizes)}Q", *sizes), head])
        self._meter.sent(len(head) + num_bytes, time.perf_counter() - started_s)

    def receive(self) -> Message:
        with self._life.use():
            message = None
            while message is None:
                message = self._next()
        self._meter.received(len(message.head) + sum(one.nbytes for one in message.frames))
        return message

    def close(self) -> None:
        self._life.end()

    def _block(self, num_bytes: int) -> tuple[int, Block]:
        """Return a block and its number; wait for room."""
        if not num_bytes:
            return 0, Block(0, 0, 0)
        taken: Taken | None = None
        while True:
            self._collect()
            if len(self._taken) < _MAX_UNRELEASED and (taken := self._arena.take(num_bytes)):
                break
            self._wait_for_release()
        self._report(taken)
        self._num_blocks += 1
        self._taken[self._num_blocks] = taken.block
        return self._num_blocks, taken.block

    def _report(self, taken: Taken) -> None:
        for number in taken.dropped:
            self._socket.send(_SEGMENT.pack(_DROPPED, number, 0))
        if (added := taken.added) is not None:
            packet = _SEGMENT.pack(_ADDED, added.number, added.num_bytes)
            try:
                socket.send_fds(self._socket, [packet], [added.descriptor])
            finally:
                os.close(added.descriptor)

    def _collect(self) -> None:
        """Take back what the other side has released."""
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(self._pipes.given_back, 4096):
                for (number,) in _NUMBER.iter_unpack(numbers):
                    if block := self._taken.pop(number, None):
                        self._arena.give(block)
            raise LinkClosed("the other side is gone")

    def _wait_for_release(self) -> None:
        poll = select.poll()
        poll.register(self._pipes.given_back, select.POLLIN)
        # only whether it is closed, by either side
        poll.register(self._socket, 0)
        for descriptor, _ in poll.poll():
            if descriptor == self._socket.fileno():
                raise LinkClosed("the other side is gone")

    def _next(self) -> Message | None:
        size, notes, flags, _ = self._socket.recvmsg_into(
            [self._packet], _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        descriptors = [number for note in notes for (number,) in struct.iter_unpack("=i", note[2])]
        try:
            if not size:
                raise LinkClosed("the other side is gone")
            if flags & _CUT:
                raise ValueError(f"a packet of more than {_MOST_BYTES} bytes")
            return self._read(memoryview(self._packet)[:size], descriptors)
        except (struct.error, ValueError, LookupError) as error:
            raise LinkClosed(f"the other side has sent what is no message: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(self, packet: memoryview, descriptors: Sequence[int]) -> Message | None:
        if packet[0] == _MESSAGE:
            return self._message(packet)
        what, number, num_bytes = _SEGMENT.unpack(packet)
        if what == _DROPPED:
            del self._segments[number]
            return None
        known = sum(one.nbytes for one in self._segments.values())
        if what != _ADDED or known + num_bytes > self._room_bytes + mmap.PAGESIZE:
            raise ValueError(f"{what}, segments of {known + num_bytes} bytes")
        self._segments[number] = mapped(descriptors[0], num_bytes)
        return None

    def _message(self, packet: memoryview) -> Message:
        _, number, segment, num_frames, begin = _PLACE.unpack_from(packet)
        if num_frames > MAX_FRAMES:
            raise ValueError(f"{num_frames} frames")
        sizes = struct.unpack_from(f"={num_frames}Q", packet, _PLACE.size)
        head = bytes(packet[_PLACE.size + 8 * num_frames :])
        places = Places.of(sizes)
        if not places.num_bytes:
            return without_bytes(head, num_frames)
        memory = self._segments[segment][begin : begin + places.num_bytes]
        if memory.nbytes < places.num_bytes or sum(sizes) > self._limits.max_message_bytes:
            raise ValueError(f"frames of {sum(sizes)} bytes at {begin} of segment {segment}")
        found = zip(places.offsets, sizes, strict=True)
        frames = tuple(memory[offset : offset + size] for offset, size in found)
        return Message(head, frames, lambda: self._release(number))

    def _release(self, number: int) -> None:
        # who is gone needs nothing back
        with contextlib.suppress(LinkClosed), self._life.use():
            os.write(self._pipes.give_back, _NUMBER.pack(number))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _free(self) -> None:
        self._socket.close()
        self._pipes.close()
        self._segments.clear()
        self._arena.clear()
