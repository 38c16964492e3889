"""How much of something bounded a client may hold, so that nobody can keep others out."""

from __future__ import annotations

from collections.abc import Iterable


def fits(wanted: int, others: Iterable[int], most: int) -> bool:
    """Return whether a client may hold so much, beside what others hold.

    Max-min fairness: each of the others counts for what it holds, but for no more than this client
    would hold. So a client alone may hold ``most``, and each of k clients may always hold
    ``most / k``, whatever the others have taken before. All k together hold at most ``most`` times
    the sum of 1/n up to k: whoever took last of the n that hold the most had to fit n times.

    Args:
        wanted: what the client would hold in all.
        others: what each other client holds.
        most: what clients share.
    """
    return wanted + sum(min(wanted, held) for held in others) <= most
