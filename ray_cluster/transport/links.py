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


class LinkClosed(Exception):
    """The other side is gone, or this side has closed the link."""


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

        Waits while the other side is not reading.

        Raises:
            LinkClosed: the link is closed, here or there, or becomes so meanwhile.
        """

    def receive(self) -> Message:
        """Wait for the next message; one thread calls this, and always reads.

        Raises:
            LinkClosed: the link is closed, here or there.
        """

    def close(self) -> None:
        """Close it; whoever waits in it gets :class:`LinkClosed`. From any thread."""
