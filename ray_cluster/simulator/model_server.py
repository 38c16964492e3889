"""Serves one model in batches of whole images: the queue, and the replicas that take from it.

This is where the simulation of cascades and plans touches the data path, and all that it needs of
it: `ModelServer.offer`, `add`, `remove`, `fail`, and what it tells through `ServerEvents`. Batches
begin when a replica is free and take what waits, up to the cap, as DiffServe's workers do; a
dispatcher that steps requests can stand behind the same few methods.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ray_cluster.policies.cascade import HeavyOutlook
from ray_cluster.policies.fleet import PoolSpec
from ray_cluster.simulator.events import EventQueue, Timer


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way.

    Attributes:
        confidence: that the light model's image will get.
        coin: in [0, 1), for routing at random.
        has_light_answer: whether the light model has made an image.
    """

    number: int
    service: str
    arrival_s: float
    deadline_s: float
    confidence: float
    coin: float
    is_direct: bool = False
    has_light_answer: bool = False


class ServerEvents(Protocol):
    """Who hears of what a server does."""

    def on_made(self, model: str, job: Job) -> None:
        """An image of the model is done."""

    def on_hopeless(self, job: Job) -> None:
        """A job was taken out of the queue: it could not be in time if it began now."""

    def on_gone(self, replica: Replica) -> None:
        """A replica that was to go has made its last image."""


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, from its load to its end.

    Attributes:
        free_s: instant at which its batch ends by the profile.
        timer: of its load or its batch.
    """

    spec: PoolSpec
    gpus: tuple[int, ...]
    started_s: float
    is_ready: bool = False
    is_leaving: bool = False
    batch: list[Job] = field(default_factory=list)
    free_s: float = 0.0
    timer: Timer | None = None


class ModelServer:
    """The replicas of one model and their common queue, which the most urgent leave first.

    Args:
        extra_s: seconds that every batch takes beside its images, such as the discriminator's.
        noise: factor on the seconds of each batch.
        drops_hopeless: whether jobs that can't be in time any more leave the queue.
    """

    def __init__(
        self,
        model: str,
        events: EventQueue,
        hears: ServerEvents,
        *,
        noise: Callable[[], float],
        extra_s: float = 0.0,
        drops_hopeless: bool = True,
    ) -> None:
        self.model = model
        self.max_batches: dict[str, int] = {}
        self._events = events
        self._hears = hears
        self._noise = noise
        self._extra_s = extra_s
        self._drops_hopeless = drops_hopeless
        self._queue: list[tuple[float, int, Job]] = []
        self._replicas: list[Replica] = []

    @property
    def num_waiting(self) -> int:
        """Images in no batch yet."""
        return len(self._queue)

    @property
    def num_in_batches(self) -> int:
        """Images that are being made."""
        return sum(len(one.batch) for one in self._replicas)

    def offer(self, job: Job) -> None:
        """Queue a job; a free replica begins at once."""
        heapq.heappush(self._queue, (job.deadline_s, job.number, job))
        self._feed()

    def add(self, replica: Replica) -> None:
        """Have a replica that is ready take part."""
        self._replicas.append(replica)
        self._feed()

    def remove(self, replica: Replica) -> None:
        """Have a replica go when its batch is done."""
        replica.is_leaving = True
        if not replica.batch:
            self._leave(replica)

    def fail(self, replica: Replica) -> None:
        """Have a replica die at once; its jobs begin again with others."""
        if replica.timer is not None:
            replica.timer.call_off()
        jobs, replica.batch = replica.batch, []
        self._replicas.remove(replica)
        for job in jobs:
            heapq.heappush(self._queue, (job.deadline_s, job.number, job))
        self._feed()

    def outlook(self) -> HeavyOutlook:
        """What waits for an image that is queued now; batches as long as the slowest pool's."""
        now_s = self._events.now_s
        live = [one for one in self._replicas if not one.is_leaving]
        caps = [(self._cap(one.spec), one.spec) for one in live]
        return HeavyOutlook(
            free_in_s=tuple(sorted(max(0.0, one.free_s - now_s) for one in live)),
            num_ahead=len(self._queue),
            max_batch=min((cap for cap, _ in caps), default=1),
            batch_s=max((spec.batch_s(cap) for cap, spec in caps), default=0.0) + self._extra_s,
        )

    def _cap(self, spec: PoolSpec) -> int:
        return max(1, self.max_batches.get(spec.name, 1))

    def _feed(self) -> None:
        for replica in self._replicas:
            if not self._queue:
                return
            if not replica.batch and not replica.is_leaving:
                self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        jobs = self._take(replica)
        if not jobs:
            return
        replica.batch = jobs
        expected_s = replica.spec.batch_s(len(jobs)) + self._extra_s
        # what anyone may know of the end is what the profile says
        replica.free_s = self._events.now_s + expected_s
        replica.timer = self._events.after(expected_s * self._noise(), lambda: self._end(replica))

    def _take(self, replica: Replica) -> list[Job]:
        """The most urgent jobs that a batch can still finish in time."""
        jobs: list[Job] = []
        num = min(self._cap(replica.spec), len(self._queue))
        while self._queue and len(jobs) < num:
            job = heapq.heappop(self._queue)[2]
            end_s = self._events.now_s + replica.spec.batch_s(num) + self._extra_s
            if self._drops_hopeless and end_s > job.deadline_s:
                self._hears.on_hopeless(job)
                num = min(self._cap(replica.spec), len(self._queue) + len(jobs))
            else:
                jobs.append(job)
        return jobs

    def _end(self, replica: Replica) -> None:
        jobs, replica.batch, replica.timer = replica.batch, [], None
        replica.free_s = self._events.now_s
        if replica.is_leaving:
            self._leave(replica)
        for job in jobs:
            self._hears.on_made(self.model, job)
        self._feed()

    def _leave(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        self._hears.on_gone(replica)
