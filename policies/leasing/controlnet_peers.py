"""Which replica of a ControlNet computes a step, how long that is waited for, who is suspected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# a replica that takes longer may be gone without anybody knowing it
_LEAST_SILENCE_S = 0.5
_SILENCE_IN_USUAL_TIMES = 6.0
# longest that peers wait for a late answer, at least, and in usual times of one
_LEAST_PATIENCE_S = 0.05
_PATIENCE_IN_USUAL_TIMES = 3.0
# of a step in which nobody could go on without an answer, at least
_PATIENCE_OF_ALL_S = 0.25


@dataclass(frozen=True, slots=True)
class PeerView:
    """A replica of a ControlNet that one base model's replica is connected to.

    Attributes:
        has_request: whether it keeps the request's prompt and map.
        num_outstanding: steps that it has been sent and not answered.
        is_suspect: whether it has not answered for too long.
    """

    peer_id: str
    has_request: bool = False
    num_outstanding: int = 0
    is_suspect: bool = False


def choose_peer(peers: Sequence[PeerView]) -> str | None:
    """Return the id of the replica to send a step to; None without any.

    One that answers comes before a suspect, then one that keeps the request, then the one with the
    fewest steps outstanding.
    """
    if not peers:
        return None
    return min(
        peers,
        key=lambda one: (one.is_suspect, not one.has_request, one.num_outstanding, one.peer_id),
    ).peer_id


def patience_s(usual_s: float, *, all_wait: bool) -> float:
    """Return the seconds from a step's begin until it goes on without the rows that lack residuals.

    Args:
        usual_s: that an answer usually takes; 0 if that is unknown.
        all_wait: whether every row of the step needs some.
    """
    least_s = _PATIENCE_OF_ALL_S if all_wait else _LEAST_PATIENCE_S
    return max(least_s, _PATIENCE_IN_USUAL_TIMES * usual_s)


def is_silent(waited_s: float, usual_s: float) -> bool:
    """Whether an answer takes so long that another replica is to be asked too.

    Args:
        usual_s: that an answer usually takes; 0 if that is unknown.
    """
    return waited_s > max(_LEAST_SILENCE_S, _SILENCE_IN_USUAL_TIMES * usual_s)
