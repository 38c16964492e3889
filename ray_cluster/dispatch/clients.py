"""Clients that wait for outcomes, and the outcomes that are stored for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from ray_cluster.protocol.calling.sizes import first_that_fit
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import Failure


class WaitingClients:
    """Stores outcomes until their clients fetch them, or for a while, and wakes clients that wait.

    Args:
        knows: whether a request has not ended.
        keep_s: seconds after which outcomes that are not fetched are dropped; settings change it.
    """

    def __init__(self, knows: Callable[[str], bool], keep_s: float) -> None:
        self._knows = knows
        self.keep_s = keep_s
        self._waits: dict[str, asyncio.Event] = {}
        self._outcomes: dict[str, Outcome] = {}
        # when an outcome is dropped, oldest first
        self._forget_s: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outcomes

    def keep(self, outcome: Outcome, now_s: float) -> None:
        """Store an outcome for its client, and wake the client if it waits."""
        self._outcomes[outcome.request_id] = outcome
        self._forget_s[outcome.request_id] = now_s + self.keep_s
        self.wake(outcome.request_id)

    def wake(self, request_id: str) -> None:
        if (event := self._waits.get(request_id)) is not None:
            event.set()

    @property
    def waiting(self) -> list[str]:
        """Requests whose clients wait for something to happen."""
        return list(self._waits)

    async def sleep(self, request_ids: Sequence[str], timeout_s: float) -> bool:
        """Wait until woken for one of the requests; False if that did not come in time.

        A later wait for a request takes the place of an earlier one.
        """
        event = asyncio.Event()
        for request_id in request_ids:
            self._waits[request_id] = event
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()
        finally:
            for request_id in request_ids:
                if self._waits.get(request_id) is event:
                    del self._waits[request_id]
        return event.is_set()

    def fetch(self, request_ids: Sequence[str]) -> dict[str, Outcome]:
        """Return and drop the outcomes of what has ended; what is not known counts as lost.

        What does not go into one message with the others stays for the next call.
        """
        found: dict[str, Outcome] = {}
        ended = [one for one in request_ids if one in self._outcomes]
        for request_id in first_that_fit(ended, lambda one: _num_bytes(self._outcomes[one])):
            found[request_id] = self._outcomes.pop(request_id)
            del self._forget_s[request_id]
        for request_id in request_ids:
            if request_id in found or request_id in self._outcomes:
                continue
            if not self._knows(request_id):
                message = "the dispatcher does not know this request (it may have been restarted)"
                found[request_id] = Failure(request_id, "lost", message, "queue")
        return found

    def forget(self, now_s: float) -> None:
        for request_id, forget_s in list(self._forget_s.items()):
            if forget_s > now_s:
                break
            del self._outcomes[request_id], self._forget_s[request_id]

    @property
    def next_forget_s(self) -> float | None:
        """Instant at which the next outcome is dropped; None without any."""
        return next(iter(self._forget_s.values()), None)


def _num_bytes(outcome: Outcome) -> int:
    return len(outcome.result.data) if isinstance(outcome, Completed) else 0
