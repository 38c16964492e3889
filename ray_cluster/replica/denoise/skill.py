"""What a model's replica does: it takes leases on images, makes them, and reports what they are.

Knows the lease protocol and one engine runner; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from ray_cluster.engine.stages.events import Died, RunnerEvent, Stepped
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Lease, Poll, PollReply, Registration
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.beginnings import Beginnings
from ray_cluster.replica.denoise.endings import Endings
from ray_cluster.replica.denoise.late_loras import LateLoras
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.denoise.metrics import ReplicaMetrics
from ray_cluster.replica.denoise.preemption import Preemptions
from ray_cluster.replica.denoise.preview_sender import Previews
from ray_cluster.replica.denoise.runs import Runs
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.skill import Shell, Skill
from ray_cluster.replica.states.transfer import StateTransfer

_CODING_GRACE_S = 2.0
# longest denoising step that still counts as alive
_MAX_SILENCE_S = 120.0


class DenoiseSkill(Skill):
    """Keeps one runner busy with leases.

    Everything but what it hears from the runner's threads runs on one event loop, and nothing
    computes there.

    Args:
        registration: its step cost is corrected by observation.
        runner: of the model; :meth:`start` starts it.
        delivery: has the images of edits, encodes finished ones and puts them where they belong.
        states: of unfinished requests; the runner exports to its writer.
        loras: those in memory; None where no request may name one.
        controls: ControlNets in other processes; None where there are none.
    """

    def __init__(
        self,
        registration: Registration,
        *,
        runner: Runs,
        delivery: Delivery,
        states: StateTransfer,
        loras: LoraShelf | None = None,
        controls: RemoteControlNets | None = None,
        link: DispatcherLink,
        settings: WorkerSettings | None = None,
    ) -> None:
        super().__init__(registration, link, settings)
        self._runner = runner
        self._delivery = delivery
        self._states = states
        self._loras = loras
        self._controls = controls
        self._metrics = ReplicaMetrics(registration.model, registration.replica_id)
        self._log = ReplicaLog(registration.replica_id)
        self._previews = Previews(link, registration.replica_id, delivery, self.leases.lease_of)
        self._endings = Endings(self.leases, delivery, states, self._previews, self._log)
        self._preemptions = Preemptions(runner, states, self._endings)
        self._late_loras: LateLoras | None = None
        if loras is not None:
            self._late_loras = LateLoras(runner, loras, self._endings, self.preempt)
        self._beginnings = Beginnings(
            runner,
            states,
            delivery,
            self._late_loras,
            endings=self._endings,
            log=self._log,
            metrics=self._metrics,
        )
        self._peers_version = ""

    def start(self, shell: Shell) -> Sequence[asyncio.Task[None]]:
        """Start the threads of the runner and of the states."""
        loop = asyncio.get_running_loop()
        self._states.start()
        self._runner.start(partial(self._on_event, loop, shell))
        if self._controls is not None:
            # nobody serves a ControlNet that a request needs
            self._controls.call_when_overdue(
                lambda request_id: loop.call_soon_threadsafe(self.preempt, request_id)
            )
        return ()

    def _on_event(self, loop: asyncio.AbstractEventLoop, shell: Shell, event: RunnerEvent) -> None:
        """Accept an event from one of the runner's threads."""
        if isinstance(event, Stepped):
            self._metrics.stepped(event.report)
        elif isinstance(event, Died):
            loop.call_soon_threadsafe(shell.give_up, event)
        else:
            loop.call_soon_threadsafe(self._endings.settle, event)

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        self._metrics.exported(
            total=self._states.writer.num_kept, interval=self._runner.steps_between_exports
        )
        if (merger := self._runner.merger) is not None:
            self._metrics.merged(total=merger.num_merges, is_merged=bool(merger.merged))
        asked = () if self._controls is None else self._controls.metrics()
        return (*self._metrics.snapshot(), *asked)

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread of the runner has died, or hangs."""
        self._runner.check_alive(_MAX_SILENCE_S)

    async def release(self, end_tasks: Callable[[], Awaitable[None]]) -> None:
        """Export every row at the next step boundary, and return all leases.

        Images that are being coded are finished first; other replicas go on from the states of the
        rest, which are in the store before the leases are returned.
        """
        exported = await asyncio.to_thread(self._runner.export_all)
        await end_tasks()
        left = [one.state for one in exported if one.state]
        steps_kept = await self._states.keep_all(left, self.leases.__contains__)
        for lease in self.leases:
            self._endings.give_back(lease, steps_kept.get(lease.request.request_id, 0))

    async def end_tasks(self) -> None:
        """End what is fetched, and then what is coded or stored, after a while for that."""
        beginning = (*self._beginnings.tasks, *(self._late_loras.tasks if self._late_loras else ()))
        for task in beginning:
            task.cancel()
        leaving = {*self._endings.tasks, *self._preemptions.tasks}
        if leaving:
            await asyncio.wait(leaving, timeout=_CODING_GRACE_S)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*beginning, *leaving, return_exceptions=True)

    async def stop_writing(self) -> None:
        """Write no previews and no states any more."""
        await self._previews.stop()
        await asyncio.to_thread(self._states.stop)

    async def close(self) -> None:
        """End the threads."""
        await asyncio.to_thread(self._runner.stop)
        if self._controls is not None:
            await asyncio.to_thread(self._controls.close)
        await self.stop_writing()

    def on_reply(self, reply: PollReply) -> None:
        """Note which workers may be called, and whether others wait for the model's own weights."""
        if reply.peers is not None:
            self._peers_version = reply.peers.version
            if self._controls is not None:
                self._controls.set_peers(reply.peers)
        if reply.others_wait and self._runner.merger is not None:
            self._runner.merger.note_others()

    def apply(self, settings: WorkerSettings) -> None:
        """Apply other settings, as far as memory allows; held leases stay."""
        max_batch = self._runner.set_max_batch(settings.max_batch)
        self.capacity = Capacity(settings.max_in_flight, max_batch)

    def poll(self, poll: Poll) -> Poll:
        """Return a poll with the progress of all leases, and what is in memory."""
        in_engine, leaving = self._runner.steps_done_by_id, self._preemptions.steps_done_by_id
        steps_done = {**dict.fromkeys(self._beginnings.ids, 0), **in_engine, **leaving}
        merger = self._runner.merger
        return replace(
            poll,
            steps_done_by_id=self.leases.progress(steps_done),
            step_cost=self._runner.step_cost,
            peers_version=self._peers_version,
            residents=() if self._loras is None else self._loras.residents,
            merged="" if merger is None else merger.merged,
        )

    def take(self, lease: Lease) -> None:
        """Begin with an image; what was done under an earlier lease on it is dropped."""
        self._drop(lease.request.request_id, self.leases.add(lease))
        self._beginnings.begin(lease)

    def abort(self, request_id: str, *, is_ended: bool) -> None:
        """Drop an image, and what is stored of it if it has ended."""
        self._drop(request_id, self.leases.drop(request_id))
        self._states.forget(request_id, is_ended=is_ended)
        if is_ended:
            self._delivery.note_end(request_id)

    def forget(self, request_id: str) -> None:
        """Delete the state of an image whose end the dispatcher has acknowledged."""
        self._states.forget(request_id, is_ended=True)

    def _drop(self, request_id: str, lease: Lease | None) -> None:
        """Drop the work on a request whose lease, if there was one, is not held any more."""
        if lease is not None:
            self._log.dropped(lease.request)
        self._beginnings.cancel(request_id)
        self._runner.abort(request_id)

    def preempt(self, request_id: str) -> None:
        """Return a lease; if it has ended meanwhile, its end is reported instead."""
        lease = self.leases.get(request_id)
        if lease is None:
            return
        if self._beginnings.cancel(request_id):
            self._endings.give_back(lease, 0)
        else:
            self._preemptions.begin(lease)
