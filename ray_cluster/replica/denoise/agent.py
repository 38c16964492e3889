"""A model replica as the dispatcher sees it: it registers, pulls leases, reports, and drains.

Knows the lease protocol and one engine runner; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.engine.stages.events import Died, RunnerEvent, Stepped
from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import (
    Directory,
    Lease,
    Poll,
    PollReply,
    Registration,
)
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.beginnings import Beginnings, Gathering, ReplicaAddOns
from ray_cluster.replica.denoise.endings import Endings
from ray_cluster.replica.denoise.late_loras import LateLoras
from ray_cluster.replica.denoise.metrics import ReplicaMetrics
from ray_cluster.replica.denoise.preemption import Preemptions
from ray_cluster.replica.denoise.preview_sender import Previews
from ray_cluster.replica.held_leases import HeldLeases
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.poller import LeasePoller, check_running
from ray_cluster.replica.states.transfer import StateTransfer

logger = logging.getLogger(__name__)

_CODING_GRACE_S = 2.0
# longest denoising step that still counts as alive
_MAX_SILENCE_S = 120.0


class ReplicaAgent:
    """Keeps one runner busy with leases.

    Owns the leases it holds and the ends not yet acknowledged. Everything but
    :meth:`on_runner_event` runs on one event loop, and nothing computes there.

    Args:
        registration: sent to each dispatcher; its step cost is corrected by observation.
        runner: of the model; :meth:`start` starts it.
        add_ons: what it has for requests with LoRAs and ControlNets.
        delivery: has the images of edits, encodes finished ones and puts them where they belong.
        states: of unfinished requests; the runner exports to its writer.
        link: the dispatcher.
        clock: monotonic seconds, the runner's too.
        settings: those of the registration; later ones come with replies to polls.
    """

    def __init__(
        self,
        registration: Registration,
        *,
        runner: EngineRunner,
        delivery: Delivery,
        states: StateTransfer,
        add_ons: ReplicaAddOns | None = None,
        link: DispatcherLink,
        clock: Callable[[], float],
        settings: WorkerSettings | None = None,
    ) -> None:
        self._registration = registration
        self._capacity = Capacity(registration.max_in_flight, registration.max_batch)
        self._settings_version = "" if settings is None else settings.version
        self._runner = runner
        self._delivery = delivery
        self._states = states
        self._add_ons = add_ons or ReplicaAddOns()
        self._link = link
        self._clock = clock
        self._metrics = ReplicaMetrics(registration.model, registration.replica_id)
        self._log = ReplicaLog(registration.replica_id)
        self._leases = HeldLeases(
            link, registration.replica_id, partial(states.forget, is_ended=True)
        )
        self._previews = Previews(link, registration.replica_id, delivery, self._leases.get)
        self._endings = Endings(self._leases, delivery, states, self._previews, self._log)
        self._polls = LeasePoller(
            link,
            registration,
            make_poll=self._poll,
            on_reply=self._on_reply,
            poll_s=DispatchConfig().poll_s if settings is None else settings.poll_s,
        )
        self._preemptions = Preemptions(
            self._runner, states, holds=self._leases.holds, on_stored=self._endings.give_back
        )
        self._late_loras = self._new_late_loras()
        self._beginnings = Beginnings(
            runner,
            states,
            Gathering(delivery, self._add_ons, clock),
            self._late_loras,
            on_failed=self._endings.fail,
            log=self._log,
            metrics=self._metrics,
            clock=clock,
        )
        self._peers = Directory()
        self._loops: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = False
        self._death: Died | None = None
        self._giving_up: asyncio.Task[None] | None = None

    def _new_late_loras(self) -> LateLoras | None:
        if self._add_ons.loras is None:
            return None
        return LateLoras(
            self._runner,
            self._add_ons.loras,
            holds=self._leases.holds,
            on_failed=self._endings.fail,
            on_overdue=self._preempt,
            clock=self._clock,
        )

    def start(self) -> None:
        """Start the runner's threads and the polling and reporting tasks on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._states.start()
        self._runner.start(self.on_runner_event)
        self._add_ons.call_when_overdue(self._preempt)
        self._loops = [
            asyncio.create_task(self._polls.poll_forever(), name="the polling task"),
            asyncio.create_task(self._leases.report_forever(), name="the reporting task"),
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return (*self._metrics.snapshot(), *self._add_ons.metrics())

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread or a task of the replica has died or hangs."""
        if self._death is not None:
            raise RuntimeError(str(self._death))
        self._runner.check_alive(_MAX_SILENCE_S)
        check_running(self._loops)

    async def drain(self) -> None:
        """Export every row at the next step boundary, return all leases, and stop.

        Images that are being coded are finished first; other replicas go on from the states of the
        rest, which are in the store before the leases are returned.
        """
        self._is_draining = True
        if self._giving_up is not None:
            await self._giving_up
            return
        exported = await asyncio.to_thread(self._runner.export_all)
        await self._end_tasks()
        left = [one.state for one in exported if one.state]
        steps_kept = await self._states.keep_all(left, self._leases.__contains__)
        for lease in self._leases:
            self._endings.give_back(lease, steps_kept.get(lease.request.request_id, 0))
        await self._sign_off()

    def _on_death(self, death: Died) -> None:
        """Stop for good: without its engine a replica would only hold leases up."""
        if self._is_draining:
            return
        self._is_draining = True
        self._death = death
        logger.error("%s; this replica gives up its leases", death)
        self._giving_up = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        """Have the dispatcher count the leases as lost: one of them may be what ended the engine.

        A request that ends every engine is thus tried a bounded number of times.
        """
        await self._end_tasks()
        await self._sign_off()

    async def _end_tasks(self) -> None:
        fetching = () if self._late_loras is None else tuple(self._late_loras.tasks)
        for task in (*self._loops, *self._beginnings.tasks, *fetching):
            task.cancel()
        leaving = {*self._endings.tasks, *self._preemptions.tasks}
        if leaving:
            await asyncio.wait(leaving, timeout=_CODING_GRACE_S)
        for task in leaving:
            task.cancel()
        tasks = (*self._loops, *self._beginnings.tasks, *fetching, *leaving)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sign_off(self) -> None:
        self._leases.clear()
        await self._previews.stop()
        with contextlib.suppress(DispatcherUnavailable):
            await self._leases.report()
            # whoever is leased the requests now is alone with their states
            await asyncio.to_thread(self._states.stop)
            await self._link.unregister(self._registration.replica_id)
            # asks for nothing: it carries the last metrics, and is answered at once
            await self._link.poll(self._poll(epoch=0), 0.0)
        await asyncio.to_thread(self._runner.stop)
        await asyncio.to_thread(self._add_ons.close)
        await asyncio.to_thread(self._states.stop)

    def on_runner_event(self, event: RunnerEvent) -> None:
        """Accept an event from one of the runner's threads."""
        if isinstance(event, Stepped):
            self._metrics.stepped(event.report)
        elif self._loop is None:
            return
        elif isinstance(event, Died):
            self._loop.call_soon_threadsafe(self._on_death, event)
        else:
            self._loop.call_soon_threadsafe(self._endings.settle, event)

    @property
    def peers(self) -> Directory:
        """The workers that this one may call."""
        return self._peers

    def _on_reply(self, reply: PollReply) -> None:
        if reply.peers is not None:
            self._peers = reply.peers
            self._add_ons.set_peers(reply.peers)
        if self._is_draining:
            # a poll that goes on naming what has ended is answered at once, for ever
            for request_id in reply.aborts:
                self._leases.drop(request_id)
            for lease in reply.leases:
                self._leases.add(lease)
            return
        if reply.settings is not None:
            self._apply(reply.settings)
        self._note_others(reply)
        for request_id in reply.aborts:
            self._drop(request_id)
            self._states.forget(request_id, is_ended=request_id not in reply.moved)
            if request_id not in reply.moved:
                self._delivery.note_end(request_id)
        self._leases.adopt(reply.adopted)
        for request_id in reply.preempted:
            self._preempt(request_id)
        for lease in reply.leases:
            self._take(lease)

    def _apply(self, settings: WorkerSettings) -> None:
        """Apply other settings from now on; held leases stay, even if they are too many."""
        max_batch = self._runner.set_max_batch(settings.max_batch)
        self._capacity = Capacity(settings.max_in_flight, max_batch)
        self._polls.poll_s = settings.poll_s
        self._settings_version = settings.version
        logger.info("settings %s are applied: %s", settings.version, self._capacity)

    def _note_others(self, reply: PollReply) -> None:
        if reply.others_wait and self._runner.merger is not None:
            self._runner.merger.note_others()

    def _merged(self) -> str:
        """Return the set of LoRAs that the model is merged with, and update the metrics of that."""
        if (merger := self._runner.merger) is None:
            return ""
        merged = merger.merged
        self._metrics.merged(total=merger.num_merges, is_merged=bool(merged))
        return merged

    def _poll(self, epoch: int) -> Poll:
        self._metrics.exported(
            total=self._states.writer.num_kept, interval=self._runner.steps_between_exports
        )
        merged = self._merged()
        in_engine, leaving = self._runner.steps_done_by_id, self._preemptions.steps_done_by_id
        steps_done = {**dict.fromkeys(self._beginnings.ids, 0), **in_engine, **leaving}
        num_free = max(0, self._capacity.max_in_flight - len(self._leases))
        return Poll(
            replica_id=self._registration.replica_id,
            epoch=epoch,
            num_free=0 if self._is_draining else num_free,
            steps_done_by_id=self._leases.progress(steps_done),
            step_cost=self._runner.step_cost,
            metrics=self.metrics(),
            peers_version=self._peers.version,
            settings_version=self._settings_version,
            capacity=self._capacity,
            residents=self._add_ons.residents,
            merged=merged,
        )

    def _take(self, lease: Lease) -> None:
        self._drop(lease.request.request_id)
        self._leases.add(lease)
        self._beginnings.begin(lease)

    def _drop(self, request_id: str) -> None:
        """Drop the row of a request, and what was to be reported of earlier leases on it."""
        if (lease := self._leases.drop(request_id)) is not None:
            self._log.dropped(lease.request)
        self._beginnings.cancel(request_id)
        self._runner.abort(request_id)

    def _preempt(self, request_id: str) -> None:
        """Return a lease; if it has ended meanwhile, its end is reported instead."""
        lease = self._leases.get(request_id)
        if lease is None:
            return
        if self._beginnings.cancel(request_id):
            self._endings.give_back(lease, 0)
        else:
            self._preemptions.begin(lease)
