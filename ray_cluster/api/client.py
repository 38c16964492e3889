"""What the HTTP layer asks of the dispatcher; Ray is behind it, never in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ray_cluster.leases import Outcome, Submission
from ray_cluster.requests import ImageRequest, ModelProfile


class DispatcherClient(Protocol):
    """The gateway's way to the one dispatcher of its cell.

    Every method raises :class:`~ray_cluster.errors.DispatcherUnavailable`, and nothing else, when
    the dispatcher is starting, dead or unreachable: the caller gets 503 and may try again.
    """

    async def submit(self, requests: Sequence[ImageRequest], wait_s: float) -> Submission:
        """Ask for admission of the whole group, and wait for its first outcomes if accepted.

        Accepted means that all of the group is queued. Not accepted is answered at once.
        """
        ...

    async def wait(self, request_ids: Sequence[str], timeout_s: float) -> dict[str, Outcome]:
        """Return the outcomes that are there, as soon as there is one, or nothing at the timeout.

        A call also says that the client of these attached requests still waits for them. An
        outcome is handed out once; an id that the dispatcher does not know is ``lost``.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Give these requests up; ids that are unknown or done are passed over."""
        ...

    async def models(self) -> Mapping[str, ModelProfile]:
        """Return the profile of every model that a replica has registered, by name."""
        ...
