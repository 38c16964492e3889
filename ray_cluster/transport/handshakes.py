"""How two processes agree on a link, over a new TCP connection.

The server greets with its version and a random id. The client proves that it knows the secret by
that id's HMAC. The server then offers a Unix socket in the abstract namespace, where one node has
it; the client tries it, and both go on there with shared memory if they meet. Otherwise the
connection itself is the link. All of it has one deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ray_cluster.transport.links import Link, LinkLimits, LinkRefused
from ray_cluster.transport.shared import Pipes, SharedLink
from ray_cluster.transport.tcp import TcpLink

VERSION = 1
_MAGIC = b"rcln"
_ID_BYTES = 16
# magic, version
_BEGIN = struct.Struct("!4sH")
# id, largest message, room
_GREETING = struct.Struct(f"!{_ID_BYTES}sQQ")
# proof, largest message, room, whether it can share memory
_HELLO = struct.Struct("!32sQQ?")
# what became of it, and the length of the offered socket's name
_VERDICT = struct.Struct("!BB")
_WELCOME, _WRONG_SECRET = 1, 2
_OVER_TCP, _OVER_UNIX = b"T", b"U"


@dataclass(slots=True)
class Timed:
    """A connection whose reads and writes have one deadline together.

    Attributes:
        until_s: on the monotonic clock.
    """

    connection: socket.socket
    until_s: float

    def set_timeout(self, connection: socket.socket) -> None:
        """Give a socket the time that is left; raise TimeoutError if there is none."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other side takes too long to agree on a link")
        connection.settimeout(left_s)

    def send(self, data: bytes) -> None:
        """Send all of the bytes."""
        self.set_timeout(self.connection)
        self.connection.sendall(data)

    def read(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        found = b""
        while len(found) < num_bytes:
            self.set_timeout(self.connection)
            more = self.connection.recv(num_bytes - len(found))
            if not more:
                raise ConnectionError("the other side has closed the connection")
            found += more
        return found


class _Closable(Protocol):
    def close(self) -> None: ...


def answer(timed: Timed, secret: str, limits: LinkLimits, *, offers_memory: bool) -> Link:
    """Agree with a client on a link; the connection is the link's own from then on.

    Args:
        offers_memory: whether shared memory is offered.

    Raises:
        LinkRefused: it knows no secret, or speaks another protocol.
        OSError: it is gone, or too slow.
    """
    link_id = secrets.token_bytes(_ID_BYTES)
    bounds = (limits.max_message_bytes, limits.room_bytes)
    timed.send(_BEGIN.pack(_MAGIC, VERSION) + _GREETING.pack(link_id, *bounds))
    _check_begin(timed.read(_BEGIN.size))
    proof, message_bytes, room_bytes, can_share = _HELLO.unpack(timed.read(_HELLO.size))
    if not hmac.compare_digest(proof, _proof(secret, link_id)):
        timed.send(_VERDICT.pack(_WRONG_SECRET, 0))
        raise LinkRefused("the client does not know the secret")
    limits = limits.smaller(message_bytes, room_bytes)
    if not (offers_memory and can_share):
        timed.send(_VERDICT.pack(_WELCOME, 0))
        return TcpLink(timed.connection, limits)
    with contextlib.closing(_new_socket()) as offered:
        # a name in the abstract namespace: nothing is left of it
        name = b"\0ray-cluster-link-" + secrets.token_hex(_ID_BYTES).encode()
        offered.bind(name)
        offered.listen(4)
        timed.send(_VERDICT.pack(_WELCOME, len(name)) + name)
        meeting = _met(offered, link_id, timed) if timed.read(1) == _OVER_UNIX else None
    if meeting is None:
        timed.send(_OVER_TCP)
        return TcpLink(timed.connection, limits)
    with closed_on_error(meeting):
        timed.send(_OVER_UNIX)
    timed.connection.close()
    return meeting.link(limits)


def ask(timed: Timed, secret: str, limits: LinkLimits, *, accepts_memory: bool) -> Link:
    """Agree with a server on a link; the connection is the link's own from then on.

    Args:
        accepts_memory: whether an offer of shared memory is accepted.

    Raises:
        LinkRefused: the secret is wrong, or the other side speaks another protocol.
        OSError: it is gone, or too slow.
    """
    _check_begin(timed.read(_BEGIN.size))
    link_id, message_bytes, room_bytes = _GREETING.unpack(timed.read(_GREETING.size))
    hello = _HELLO.pack(
        _proof(secret, link_id), limits.max_message_bytes, limits.room_bytes, accepts_memory
    )
    timed.send(_BEGIN.pack(_MAGIC, VERSION) + hello)
    verdict, name_bytes = _VERDICT.unpack(timed.read(_VERDICT.size))
    if verdict != _WELCOME:
        raise LinkRefused(
            "the secret is not the one that the server expects: take it from its registration, "
            "which changes when it restarts"
        )
    limits = limits.smaller(message_bytes, room_bytes)
    if not name_bytes:
        return TcpLink(timed.connection, limits)
    meeting = _meet(timed.read(name_bytes), link_id, timed)
    if meeting is None:
        timed.send(_OVER_TCP)
        timed.read(1)
        return TcpLink(timed.connection, limits)
    with closed_on_error(meeting):
        timed.send(_OVER_UNIX)
        if timed.read(1) == _OVER_UNIX:
            meeting.take(timed)
            timed.connection.close()
            return meeting.link(limits)
    meeting.close()
    return TcpLink(timed.connection, limits)


class _Meeting:
    """One side of a Unix socket, on which both give each other an end of a pipe."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._given_back = self._give_back = -1

    def hand_over(self, link_id: bytes, timed: Timed) -> None:
        """Send the id, and the end of a new pipe into which the other side is to write."""
        self._given_back, descriptor = os.pipe()
        try:
            timed.set_timeout(self.connection)
            socket.send_fds(self.connection, [link_id], [descriptor])
        finally:
            os.close(descriptor)

    def take(self, timed: Timed) -> bytes:
        """Keep the end of the other side's pipe; return the id that came with it."""
        timed.set_timeout(self.connection)
        # more than one would be cut off, and closed by the kernel
        link_id, descriptors, _, _ = socket.recv_fds(
            self.connection, _ID_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if len(descriptors) != 1:
            raise ConnectionError("the other side of the Unix socket has sent no pipe")
        self._give_back = descriptors[0]
        return link_id

    def link(self, limits: LinkLimits) -> SharedLink:
        """Return the link, which owns all of it."""
        return SharedLink(self.connection, Pipes(self._given_back, self._give_back), limits)

    def close(self) -> None:
        """Close what there is."""
        self.connection.close()
        for descriptor in (self._given_back, self._give_back):
            if descriptor >= 0:
                os.close(descriptor)


@contextlib.contextmanager
def closed_on_error(one: _Closable) -> Iterator[None]:
    """Close something if an error leaves the block."""
    try:
        yield
    except BaseException:
        one.close()
        raise


def _met(offered: socket.socket, link_id: bytes, timed: Timed) -> _Meeting | None:
    """Return the meeting with the client, who has connected; None if there are others alone."""
    offered.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            connection, _ = offered.accept()
            meeting = _Meeting(connection)
            with closed_on_error(meeting):
                if hmac.compare_digest(meeting.take(timed), link_id):
                    meeting.hand_over(link_id, timed)
                    return meeting
            meeting.close()
    return None


def _meet(name: bytes, link_id: bytes, timed: Timed) -> _Meeting | None:
    """Go to the socket that a server offers; None if it is out of reach."""
    meeting = _Meeting(_new_socket())
    try:
        with closed_on_error(meeting):
            timed.set_timeout(meeting.connection)
            meeting.connection.connect(name)
            meeting.hand_over(link_id, timed)
    except OSError:
        # another node, or a container with a network of its own
        return None
    return meeting


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _check_begin(data: bytes) -> None:
    magic, version = _BEGIN.unpack(data)
    if magic != _MAGIC:
        raise LinkRefused(f"the other side speaks another protocol: it begins with {data!r}")
    if version != VERSION:
        raise LinkRefused(
            f"the other side's links have version {version}, these here {VERSION}: all processes "
            "of a cell run one version"
        )


def _proof(secret: str, link_id: bytes) -> bytes:
    return hmac.new(secret.encode(), link_id, hashlib.sha256).digest()
