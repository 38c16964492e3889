"""What operators see of a cell at one instant, and of the hour before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# of an image's id, which names its file for whoever knows all of it
_SHOWN_CHARS = 12


def shown_id(request_id: str) -> str:
    """Return the part of a request's id that others than its client may see."""
    return request_id[:_SHOWN_CHARS]


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image that a replica holds.

    Attributes:
        id: see :func:`shown_id`.
    """

    id: str
    steps_done: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class ShownReplica:
    """A live replica.

    Attributes:
        model: name of the queue that it leases from.
        images: leased to it.
    """

    id: str
    pool: str
    model: str
    max_batch: int
    images: tuple[ShownImage, ...]


@dataclass(frozen=True, slots=True)
class ShownWaiting:
    """An image that waits.

    Attributes:
        in_s: seconds to its deadline.
    """

    id: str
    model: str
    in_s: float


@dataclass(frozen=True, slots=True)
class CellPoint:
    """Ten seconds of a cell.

    Attributes:
        at: Unix time in seconds of their end.
        waiting: images in queues then.
        running: leased ones then.
        done: completed meanwhile.
        late: of these, after their deadline.
        failed: by no fault of their clients.
        refused: not accepted.
    """

    at: float
    waiting: int
    running: int
    done: int
    late: int
    failed: int
    refused: int


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell at one instant.

    Attributes:
        at: Unix time in seconds.
        waiting: images in its queue, by model.
        queue: the first by their deadlines; not all of many.
        loras: names; not all of many.
        history: the points that were asked for, the earliest first.
    """

    at: float
    waiting: Mapping[str, int]
    replicas: tuple[ShownReplica, ...]
    queue: tuple[ShownWaiting, ...]
    loras: tuple[str, ...]
    controlnets: tuple[str, ...]
    warnings: tuple[str, ...]
    history: tuple[CellPoint, ...]
