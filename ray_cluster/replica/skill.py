"""What one kind of worker can do; all else is its shell's, `ray_cluster/cell/worker.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Lease, Poll, PollReply, Registration
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica.held_leases import HeldLeases


class Shell(Protocol):
    """What a skill may ask of the worker that it is of."""

    async def poll_now(self) -> PollReply:
        """Poll at once, which ends the poll that is held; return the reply, applied already."""

    def give_up(self, death: object) -> None:
        """Drain without :meth:`Skill.release`, and report the worker as dead of something."""


class Skill:
    """A kind of worker overrides what it does; nothing is done here.

    All is called on the worker's event loop.

    Args:
        registration: sent to each dispatcher.
        link: the dispatcher.
        settings: those of the registration; None for the defaults.

    Attributes:
        leases: that it holds, and their ends until these are acknowledged.
        capacity: by the present settings.
    """

    def __init__(
        self,
        registration: Registration,
        link: DispatcherLink,
        settings: WorkerSettings | None = None,
    ) -> None:
        self.registration = registration
        self.link = link
        self.settings = settings
        self.leases = HeldLeases(link, registration.replica_id, self.forget)
        self.capacity = Capacity(registration.max_in_flight, registration.max_batch)

    def start(self, _shell: Shell) -> Sequence[asyncio.Task[None]]:
        """Start its threads; return its own tasks, which run until the worker cancels them."""
        return ()

    def on_registered(self) -> None:
        """Begin with a dispatcher that knows nothing but the registration."""

    def poll(self, poll: Poll) -> Poll:
        """Return a poll with what is to be said beside what every worker says: of its leases, that
        nothing of them is done in part."""
        begun = dict.fromkeys((lease.request.request_id for lease in self.leases), 0)
        return replace(poll, steps_done_by_id=self.leases.progress(begun))

    def on_reply(self, reply: PollReply) -> None:
        """Apply what is no lease's in a reply, also while the worker drains."""

    def apply(self, settings: WorkerSettings) -> None:
        """Apply other settings from now on; held leases stay, even if they are too many."""
        self.capacity = Capacity(settings.max_in_flight, settings.max_batch)

    def abort(self, request_id: str, *, is_ended: bool) -> None:
        """Drop a request, which another worker may need to go on with unless it has ended."""

    def preempt(self, request_id: str) -> None:
        """Return a lease; if it has ended meanwhile, its end is reported instead."""

    def take(self, lease: Lease) -> None:
        """Begin with a lease, which replaces an earlier one on its request."""

    def forget(self, request_id: str) -> None:
        """Forget a request whose end the dispatcher has acknowledged."""

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return ()

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread has died, or a piece of work hangs."""

    async def release(self, end_tasks: Callable[[], Awaitable[None]]) -> None:
        """End all work, and the leases that others are to go on with.

        Args:
            end_tasks: ends the worker's tasks and :meth:`end_tasks`; polls go on until then.
        """
        await end_tasks()

    async def end_tasks(self) -> None:
        """End the tasks of single requests."""

    async def stop_writing(self) -> None:
        """Stop to write what others may write once this worker is not registered any more."""

    async def close(self) -> None:
        """End threads; the worker is not registered any more."""
