"""The interface of connections that carry tensors as bytes beside a small head.

A link is two-way and ordered. How bytes move is the back end's: within a process, through memory
that two processes share, or over TCP; device memory (CUDA IPC, NCCL) would be another, with frames
that are handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

LinkKind = Literal["in-process", "shared-memory", "tcp"]
Bytes = npt.NDArray[np.uint8]
"""A flat array, contiguous."""


# a head says what frames are; what is larger belongs into a frame
MAX_HEAD_BYTES = 64 * 1024
MAX_FRAMES = 256


class LinkClosed(Exception):
    """The other side is gone, or this side has closed the link."""


class LinkRefused(Exception):
    """There is no link: nobody listens there, or one side does not accept the other."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of a link; of the two ends' limits, the smaller ones hold.

    Attributes:
        max_message_bytes: of the frames of a message.
        room_bytes: of unreleased frames in one direction, where an end holds memory for the other;
            at least ``max_message_bytes``.
        handshake_s: longest time from connecting to the first message.
    """

    max_message_bytes: int = 512 * 2**20
    room_bytes: int = 768 * 2**20
    handshake_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.max_message_bytes <= self.room_bytes:
            raise ValueError(
                f"max_message_bytes {self.max_message_bytes} must be above 0 and at most "
                f"room_bytes {self.room_bytes}: raise room_bytes"
            )

    def smaller(self, max_message_bytes: int, room_bytes: int) -> LinkLimits:
        """Return the limits that the other end keeps too."""
        message_bytes = min(self.max_message_bytes, max_message_bytes)
        room_bytes = max(min(self.room_bytes, room_bytes), message_bytes)
        return LinkLimits(message_bytes, room_bytes, self.handshake_s)

    def check(self, head: bytes, frames: Sequence[Bytes]) -> int:
        """Return the bytes of all frames together.

        Raises:
            ValueError: the message is beyond the bounds, or a frame is not flat and contiguous.
        """
        num_bytes = sum(frame.nbytes for frame in frames)
        if any(one.dtype != np.uint8 or not _is_flat(one) for one in frames):
            raise ValueError("frames are flat and contiguous arrays of uint8")
        if len(head) > MAX_HEAD_BYTES or len(frames) > MAX_FRAMES:
            raise ValueError(
                f"a head of {len(head)} bytes and {len(frames)} frames; at most {MAX_HEAD_BYTES} "
                f"bytes and {MAX_FRAMES} frames: send several messages"
            )
        if num_bytes > self.max_message_bytes:
            raise ValueError(
                f"a message of {num_bytes} bytes; at most {self.max_message_bytes} of the smaller "
                "end's max_message_bytes: send several, or raise it at both ends"
            )
        return num_bytes


def _is_flat(frame: Bytes) -> bool:
    return frame.ndim == 1 and frame.flags.c_contiguous


@dataclass(frozen=True, slots=True)
class Message:
    """What arrives in one piece.

    Attributes:
        frames: flat and read-only; valid until :attr:`release` is called.
        release: gives their memory back; to be called once, from any thread. Until then the other
            side has less room to send.
    """

    head: bytes
    frames: tuple[Bytes, ...]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a link has carried so far, heads and frames.

    Attributes:
        send_s: seconds that sends took, waiting for room included.
    """

    num_sent: int = 0
    sent_bytes: int = 0
    num_received: int = 0
    received_bytes: int = 0
    send_s: float = 0.0


class Link(Protocol):
    """One end of a connection."""

    @property
    def kind(self) -> LinkKind:
        """Which back end it is."""

    @property
    def traffic(self) -> Traffic:
        """What it has carried."""

    def send(self, head: bytes, frames: Sequence[Bytes] = ()) -> None:
        """Send a message; the frames may change once this returns. From any thread.

        Waits while the other side is not reading, or has no room left: both sides must always read
        and release, in a thread that does not send.

        Raises:
            LinkClosed: the link is closed, here or there, or becomes so meanwhile.
            ValueError: the message is beyond the link's limits.
        """

    def receive(self) -> Message:
        """Wait for the next message; one thread calls this, and always reads.

        Raises:
            LinkClosed: the link is closed, here or there.
        """

    def close(self) -> None:
        """Close it; whoever waits in it gets :class:`LinkClosed`. From any thread."""
