"""Repeats a call to a service while there is no answer, and says so once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from ray_cluster.cli.output import warn
from ray_cluster.cli.remote_service import NoAnswer

AnswerT = TypeVar("AnswerT")

_AGAIN_S = 0.5


def ask_again(
    call: Callable[[], AnswerT], *, until_s: float, console: Console, is_known: bool = True
) -> AnswerT:
    """Return the answer of a call.

    Args:
        until_s: the instant, by ``time.monotonic``, from which on no answer is raised.
        console: is told that there is none.
        is_known: whether the service has answered before. A service that is not there, or that
            refuses for now, is waited for only once it is known to have been reached.

    Raises:
        NoAnswer: until the instant, or from an unknown service.
    """
    is_told = False
    while True:
        try:
            answer = call()
        except NoAnswer as error:
            is_known = is_known or error.kind == "lost"
            if not is_known or time.monotonic() + _AGAIN_S > until_s:
                raise
            if not is_told:
                warn(f"{error}; trying again", console)
            is_told = True
        else:
            if is_told:
                console.print("the service answers again")
            return answer
        time.sleep(_AGAIN_S)
