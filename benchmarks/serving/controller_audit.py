"""Whether every call of a run ended once, with the image of its seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.serving.contenders import Counts

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A call that has ended.

    Attributes:
        number: of the call, unique in a run.
        subject: model and seed; calls with the same one must get the same image.
        pixels: [H, W, 3]; None if there was no image.
        error: what the client got instead.
    """

    number: int
    subject: tuple[str, int]
    pixels: Pixels | None
    error: str = ""


def audit(num_sent: int, ended: Sequence[Ended], counts: Counts) -> list[str]:
    """Return what went wrong, in words.

    Args:
        num_sent: calls that clients sent.
        ended: those that ended.
        counts: what the service counted of them.
    """
    return [
        *_lost(num_sent, ended, counts),
        *_failed(ended),
        *_made_twice(ended, counts),
        *_differing(ended),
    ]


def _lost(num_sent: int, ended: Sequence[Ended], counts: Counts) -> Iterator[str]:
    num_ended = len({one.number for one in ended})
    if num_ended < num_sent:
        yield f"{num_sent - num_ended} of {num_sent} calls never ended"
    if counts.open > 0:
        yield f"{counts.open} images were accepted and never ended: {counts}"


def _failed(ended: Sequence[Ended]) -> Iterator[str]:
    errors = Counter(one.error for one in ended if one.pixels is None)
    for error, number in errors.items():
        yield f"{number} calls failed: {error}"


def _made_twice(ended: Sequence[Ended], counts: Counts) -> Iterator[str]:
    for number, times in Counter(one.number for one in ended).items():
        if times > 1:
            yield f"the call {number} ended {times} times"
    num_images = sum(one.pixels is not None for one in ended)
    if counts.completed > num_images:
        yield f"the service completed {counts.completed} images, and clients got {num_images}"


def _differing(ended: Sequence[Ended]) -> Iterator[str]:
    first: dict[tuple[str, int], Pixels] = {}
    for one in ended:
        if one.pixels is None:
            continue
        known = first.setdefault(one.subject, one.pixels)
        # a batch of another size may round otherwise
        if (
            known.shape != one.pixels.shape
            or np.abs(known.astype(int) - one.pixels.astype(int)).max() > 1
        ):
            yield f"the image of call {one.number} is not the first one of {one.subject}"
