"""Lets a service finish the images in flight before it stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

# what images that are being made may still take after a signal
DRAIN_S = 10.0
_POLL_S = 0.2
# in which gateways pass the end of their calls on
_ANSWER_S = 1.0


class Draining(Protocol):
    """A service that can be asked to take no more, and what it still has."""

    @property
    def has_run(self) -> bool:
        """Whether anything can be in flight."""

    def close_admission(self) -> None:
        """Refuse new images."""

    def end_attached(self) -> None:
        """End what clients wait for on an open connection: they hear that it is not made."""

    def num_in_flight(self) -> int | None:
        """Return the images in flight; None if that is not known."""


def drain(service: Draining, show: Callable[..., None], *, limit_s: float = DRAIN_S) -> None:
    """Close admission, and wait until nothing is in flight, at most ``limit_s``.

    ``show(name, state, is_done=)`` hears what is waited for. KeyboardInterrupt ends the wait.
    """
    if service.has_run:
        show("images", "closing admission")
    service.close_admission()
    if not service.has_run:
        return
    try:
        _wait(service, show, limit_s)
    except KeyboardInterrupt:
        show("images", "left as they are: jobs go on later")
        raise


def _wait(service: Draining, show: Callable[..., None], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while (num_images := service.num_in_flight()) != 0:
        if time.monotonic() > deadline_s:
            left = f"{_words(num_images)} left after {limit_s:.0f} s"
            show("images", f"{left}: open calls get a 503, jobs go on later")
            service.end_attached()
            time.sleep(_ANSWER_S)
            return
        show(
            "images",
            f"{_words(num_images)} being finished, at most {limit_s:.0f} s; Ctrl-C again leaves",
        )
        time.sleep(_POLL_S)
    show("images", "none in flight", is_done=True)


def _words(num_images: int | None) -> str:
    # silence is no proof that nothing is in flight
    return "an unknown number" if num_images is None else str(num_images)
