"""How much goes into one message: images travel in messages, which have a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# of images, in one message of several; half of what a message holds (rpc.MAX_MESSAGE_BYTES)
_MOST_BYTES = 128 << 20


def first_that_fit(items: Sequence[T], num_bytes: Callable[[T], int]) -> Sequence[T]:
    """Return the first items that go into one message, in their order; at least one, if any."""
    total = 0
    for index, item in enumerate(items):
        total += num_bytes(item)
        if total > _MOST_BYTES and index > 0:
            return items[:index]
    return items
