"""The dispatch core as a service for asyncio: long polls, waiting clients, housekeeping."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.cascades.candidates import Candidates
from ray_cluster.dispatch.clients import WaitingClients
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.held_polls import HeldPolls, says_something
from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.dispatch.predictions import Predicts
from ray_cluster.dispatch.records import Restored
from ray_cluster.dispatch.reports.cell_views import cell_view
from ray_cluster.dispatch.reports.observing import InForce, Instant, observe
from ray_cluster.dispatch.reports.snapshots import ClusterSnapshot
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import Offer
from ray_cluster.process.tasks import Tasks
from ray_cluster.process.turns import act_in_parts
from ray_cluster.protocol.calling.timeouts import sleep_and_read
from ray_cluster.protocol.cell_view import CellPoint, CellView
from ray_cluster.protocol.controller import CascadeInForce, Observation
from ray_cluster.protocol.leases import Finished, Poll, PollReply, Registration, ReplicaEvent, Shown
from ray_cluster.protocol.outcomes import Deferred, ImageUpdate, Outcome, Progress, Submission
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.requests import ImageRequest, ModelProfile, PromptTokenizer

Keeper = Callable[[Outcome | Deferred], None]
"""Called on the event loop and at once: with how a request ended, and before that perhaps with the
decision that a heavy model makes its image."""
# held calls that are answered before others have their turn
_AT_ONCE = 10


class DispatchService:
    """Serves one :class:`DispatchCore` to gateways and replicas on one event loop.

    Calls into the core have no await inside, so they are atomic with each other.

    Args:
        config: the core's.
        clock: monotonic seconds; long polls are timed by the event loop's own clock.
        on_outcome: called with every request's end, on the event loop and at once.
        candidates: publishes and deletes images of earlier stages in the result store; None where
            no request asks for storing.
        on_metrics: called with a replica's id and the metrics that come with its polls.
        on_register: called with every registration.

    Attributes:
        on_wanted: called when a model without a replica is wanted, or a replica has gone.
    """

    def __init__(
        self,
        core: DispatchCore,
        *,
        config: DispatchConfig,
        clock: Callable[[], float],
        on_outcome: Callable[[Outcome], None] | None = None,
        candidates: Candidates | None = None,
        on_metrics: Callable[[str, Snapshot], None] | None = None,
        on_register: Callable[[Registration], None] | None = None,
    ) -> None:
        self._core = core
        self._attached_s = config.attached_timeout_s
        self._clock = clock
        self._on_outcome = on_outcome
        self._candidates = candidates
        self._on_metrics = on_metrics
        self._on_register = on_register
        self._polls = HeldPolls(core, clock)
        self._clients = WaitingClients(self._knows, config.attached_timeout_s)
        self._keepers: dict[str, Keeper] = {}
        self._housekeeping: asyncio.Task[None] | None = None
        self._tasks = Tasks()
        self._catching_up: asyncio.Task[None] | None = None
        self._version, self._times = "", config
        self.on_wanted: Callable[[], None] = lambda: None

    def apply(self, settings: Settings) -> None:
        """Apply other settings. Held polls are answered if replicas have to apply them, too, and
        all held calls if their times are others: they come again.
        """
        self._core.apply(settings, self._clock())
        self._settle(self._core.take_outcomes())
        self._attached_s = self._clients.keep_s = settings.dispatch.attached_timeout_s
        if settings.version != self._version:
            self._tasks.spawn(act_in_parts(self._polls.held, _AT_ONCE, self._polls.end))
        if settings.dispatch != self._times:
            self._tasks.spawn(act_in_parts(self._clients.waiting, _AT_ONCE, self._clients.wake))
        self._version, self._times = settings.version, settings.dispatch

    async def pool_settings(self, pool: str) -> WorkerSettings | None:
        return self._core.worker_settings(pool)

    async def register(self, registration: Registration) -> int:
        """Add a replica; return the epoch that its polls must carry."""
        self.start()
        self._polls.end(registration.replica_id)
        epoch = self._core.register(registration, self._clock())
        if self._on_register is not None:
            self._on_register(registration)
        self._settle(self._core.take_outcomes())
        self._polls.wake()
        return epoch

    @property
    def loras(self) -> Loras:
        """The LoRAs of the cell; call :meth:`note_loras` after a change."""
        return self._core.loras

    def note_loras(self) -> None:
        """Tell stores of changes."""
        self._core.advance_held_back(self._clock())
        self._settle(self._core.take_outcomes())
        self._polls.wake()

    def remember(self, registrations: Iterable[Registration]) -> None:
        self._core.remember(registrations, self._clock())

    async def unregister(self, replica_id: str) -> None:
        """Remove a replica; what it has not returned waits again."""
        self._core.unregister(replica_id, self._clock())
        self._settle(self._core.take_outcomes())
        self._polls.end(replica_id)
        self._polls.wake()
        self.on_wanted()

    async def poll(self, poll: Poll, wait_s: float = math.inf) -> PollReply:
        """Return leases and aborts for a replica; held while there are none, for at most ``wait_s``
        and ``poll_s``.

        A replica has one poll at a time: a second one ends the first, which then grants nothing. A
        report ends the held poll too: poll again, with the new number of free slots. Leases are
        granted in the last instant before the return, so a cancelled poll loses none.
        """
        if self._on_metrics is not None and poll.metrics is not None:
            self._on_metrics(poll.replica_id, poll.metrics)
        self._polls.end(poll.replica_id)
        reply = self._core.poll(poll, self._clock())
        self._settle(self._core.take_outcomes())
        if poll.loras is not None:
            # of what a store has by now, others may have waited
            self._polls.wake()
        if not says_something(reply):
            reply = await self._polls.hold(poll.replica_id, wait_s)
        if reply.leases and self._core.num_waiting:
            # this replica may be full now, which leaves more to the others
            self._polls.wake()
        return reply

    async def report(
        self, replica_id: str, events: Sequence[ReplicaEvent]
    ) -> tuple[str, ...] | None:
        """Apply a replica's events; return the ids with stale fences.

        None if the replica is not known; see :meth:`DispatchCore.report`.
        """
        num_waiting = self._core.num_waiting
        outcomes, stale = self._core.report(replica_id, events, self._clock())
        self._settle(outcomes)
        self._polls.end(replica_id)
        is_finished = all(isinstance(one, Finished) for one in events)
        if not is_finished or self._core.num_waiting > num_waiting:
            # a request may wait for others: again, or for its next stage
            self._polls.wake()
        return stale

    async def submit(
        self, requests: Sequence[ImageRequest], client: str, wait_s: float
    ) -> Submission:
        """Offer a group and, if it is accepted, wait for its first outcomes in the same call."""
        offer = await self.offer(requests, client)
        if not offer.accepted:
            return Submission(offer)
        ids = [request.request_id for request in requests]
        return Submission(offer, await self.wait(ids, wait_s))

    async def offer(self, requests: Sequence[ImageRequest], client: str = "") -> Offer:
        """Queue all of an API call's images or none; see :meth:`DispatchCore.offer`.

        Args:
            client: whose images they are, for the bound on its images in flight.
        """
        self.start()
        if any(request.request_id in self._clients for request in requests):
            return Offer(accepted=False, reason="duplicate_id")
        offer = self._core.offer(requests, self._clock(), client=client)
        if offer.accepted:
            self._note_wanted(requests)
            self._polls.wake()
        self._settle(self._core.take_outcomes())
        return offer

    async def estimate(self, requests: Sequence[ImageRequest], client: str) -> Offer:
        """See :meth:`DispatchCore.estimate`."""
        return self._core.estimate(requests, self._clock(), client=client)

    async def offer_durable(self, requests: Sequence[ImageRequest], keeper: Keeper) -> Offer:
        """Queue all of a job's images or none; they do not depend on a client's presence."""
        self.start()
        offer = self._core.offer(requests, self._clock(), client=None)
        if offer.accepted:
            self._keepers.update(dict.fromkeys((one.request_id for one in requests), keeper))
            self._note_wanted(requests)
            self._polls.wake()
        self._settle(self._core.take_outcomes())
        return offer

    def expect(self, request_ids: Iterable[str]) -> None:
        """See :meth:`DispatchCore.expect`."""
        self._core.expect(request_ids)

    def restore(self, restored: Restored, keeper: Keeper) -> None:
        """Queue a durable request that an earlier dispatcher accepted."""
        self._core.restore(restored, self._clock())
        self._keepers[restored.request.request_id] = keeper
        self._settle(self._core.take_outcomes())
        self._polls.wake()

    def open_requests(self) -> Iterator[ImageRequest]:
        return self._core.open_requests()

    def progress(
        self, request_ids: Iterable[str], *, predicts: Predicts
    ) -> tuple[Progress | None, ...]:
        return self._core.progress(request_ids, self._clock(), predicts=predicts)

    def has_begun(self, request_ids: Iterable[str]) -> bool:
        return self._core.has_begun(request_ids)

    async def close_admission(self) -> None:
        """Refuse every offer from now on; see :meth:`DispatchCore.close_admission`."""
        self._core.close_admission()

    async def wait(self, request_ids: Iterable[str], wait_s: float) -> dict[str, Outcome]:
        """Return the outcomes that there are, as soon as there is one; empty after a while.

        The long poll of a client, which also keeps its requests alive: call it again at once for
        the rest. It is held for ``wait_s``, but for at most a third of ``attached_timeout_s``. An
        outcome is returned once. An id that is not known here (never accepted, returned already, or
        of an earlier dispatcher) is ``lost``.
        """
        ids = tuple(request_ids)
        self._core.touch(ids, self._clock())
        found = self._clients.fetch(ids)
        if found or not ids:
            return found
        await self._sleep(ids, wait_s)
        return self._clients.fetch(ids)

    async def watch(self, request_id: str, seen: int, wait_s: float) -> ImageUpdate:
        """Return how a request ended, or a preview after number ``seen``, as soon as it is there.

        Otherwise like :meth:`wait`, and nothing after a while.
        """
        self._core.touch([request_id], self._clock())
        view = self._look(request_id, seen)
        if view != ImageUpdate():
            return view
        await self._sleep([request_id], wait_s)
        return self._look(request_id, seen)

    def _look(self, request_id: str, seen: int) -> ImageUpdate:
        preview = self._core.preview(request_id)
        is_news = preview is not None and preview.index > seen
        outcome = self._clients.fetch([request_id]).get(request_id)
        return ImageUpdate(outcome, preview if is_news else None)

    async def _sleep(self, request_ids: Sequence[str], wait_s: float) -> None:
        if not await self._clients.sleep(request_ids, min(wait_s, self._attached_s / 3)):
            self._core.touch(request_ids, self._clock())

    async def show(self, replica_id: str, shown: Shown) -> None:
        """Store a preview, and wake the client that watches."""
        if self._core.show(replica_id, shown):
            self._clients.wake(shown.request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End the requests now; ended ones are ignored."""
        self._settle(self._core.abort(request_ids))
        self._polls.wake()

    async def leave(self, request_ids: Collection[str]) -> None:
        """Forget requests that another cell goes on with; nothing that is stored is deleted."""
        for outcome in self._core.leave(request_ids):
            self._keepers.pop(outcome.request_id, None)
        self._polls.wake()

    async def end_attached(self) -> None:
        self._settle(self._core.end_attached())
        self._polls.wake()

    async def models(self) -> dict[str, ModelProfile]:
        return self._core.models()

    async def prompt_tokenizers(self, model: str) -> tuple[PromptTokenizer, ...]:
        return self._core.replicas.prompt_tokenizers(model)

    def observe(
        self,
        in_force: InForce,
        known: Mapping[str, Registration],
        cursors: Mapping[str, int],
        unix_s: float,
    ) -> Observation:
        """See :func:`ray_cluster.dispatch.reports.observing.observe`."""
        return observe(self._core, in_force, known, cursors, Instant(self._clock(), unix_s))

    def view(
        self, warnings: tuple[str, ...], history: tuple[CellPoint, ...], unix_s: float
    ) -> CellView:
        """See :func:`ray_cluster.dispatch.reports.cell_views.cell_view`."""
        return cell_view(self._core, warnings, history, Instant(self._clock(), unix_s))

    def seats(self) -> dict[str, Mapping[str, tuple[int, ...]]]:
        """Return which ranks of each group step for which requests, by replica."""
        return {one.replica_id: one.seats for one in self._core.replicas if one.group is not None}

    def cascades_in_force(self) -> tuple[CascadeInForce, ...]:
        """Return what each cascade does now, and what it has done."""
        return self._core.cascades.in_force()

    async def snapshot(self) -> ClusterSnapshot:
        return self._core.snapshot(self._clock())

    def start(self) -> None:
        """Start housekeeping on the running loop; ``register`` and ``offer`` do it as well."""
        if self._housekeeping is None:
            self._housekeeping = self._tasks.spawn(self._keep_house(), "housekeeping")

    async def close(self) -> None:
        """Stop housekeeping and end all held polls."""
        self._polls.end_all()
        await self._tasks.close()
        if self._candidates is not None:
            await self._candidates.close()

    @property
    def starting(self) -> tuple[str, ...]:
        """Restored models of which no replica has registered yet, and one is to come."""
        starting, asleep = self._core.replicas.starting, self._core.queue.asleep
        return tuple(one for one in starting if one not in asleep)

    def note_asleep(self, models: Collection[str], *, is_woken: bool) -> None:
        """Know which models have no replicas by a plan, and whether calls for them wake one."""
        self._core.queue.note_asleep(models, is_woken=is_woken)

    def _note_wanted(self, requests: Sequence[ImageRequest]) -> None:
        """Say so if accepted requests are for a model without a replica."""
        if any(not self._core.replicas.ids(name) for one in requests for name in one.models):
            self.on_wanted()

    @property
    def is_healthy(self) -> bool:
        """Whether housekeeping runs, or was not needed yet."""
        return self._housekeeping is None or not self._housekeeping.done()

    def _knows(self, request_id: str) -> bool:
        is_published = self._candidates is not None and request_id in self._candidates
        return is_published or self._core.knows(request_id)

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        """Hand outcomes to jobs, or store them for their clients."""
        for deferred in self._core.take_deferred():
            if (keeper := self._keepers.get(deferred.request_id)) is not None:
                keeper(deferred)
            # a client that watches sees the light image
            self._clients.wake(deferred.request_id)
        for outcome in outcomes:
            if self._candidates is None:
                self._hand_over(outcome)
            else:
                self._candidates.delete(self._core.take_unpublished())
                self._candidates.settle(outcome, self._hand_over)
        if self._core.is_behind and (self._catching_up is None or self._catching_up.done()):
            self._catching_up = self._tasks.spawn(self._catch_up())

    def _hand_over(self, outcome: Outcome) -> None:
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        if (keeper := self._keepers.pop(outcome.request_id, None)) is not None:
            keeper(outcome)
        else:
            self._clients.keep(outcome, self._clock())

    async def _catch_up(self) -> None:
        """Do what is left of some work on many requests, while others have their turn."""
        while self._core.is_behind:
            await asyncio.sleep(0)
            self._settle(self._core.catch_up(self._clock()))
            self._polls.wake()

    async def _keep_house(self) -> None:
        """Act on silence and drop old outcomes, whenever the next of these is due."""
        while True:
            now_s = self._clock()
            self._settle(self._core.expire(now_s))
            self._clients.forget(now_s)
            self._polls.wake()
            await sleep_and_read(self._housekeeping_in_s(now_s))

    def _housekeeping_in_s(self, now_s: float) -> float:
        """Seconds to the next silence that counts, as far as known, and not more than a poll."""
        due_s = [self._core.next_event_s(), self._clients.next_forget_s]
        wait_s = min((one - now_s for one in due_s if one is not None), default=self._core.hold_s)
        return min(self._core.hold_s, max(0.01, wait_s))
