"""A simulated replica: leases requests, steps their rows as its policy decides, and reports ends.

It uses the lease protocol of live replicas. The device knows what a step costs. A step of rows with
ControlNets on other devices has two halves, between which it waits for their residuals.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ray_cluster.policies.steps.step_policy import StepDecision, StepPolicy, StepView
from ray_cluster.policies.types import RequestView, RowView
from ray_cluster.protocol.leases import (
    Failed,
    Finished,
    Lease,
    Registration,
    ReplicaEvent,
    Returned,
    Scored,
)
from ray_cluster.protocol.settings import Capacity
from ray_cluster.requests import Failure, ImageResult, Timing
from ray_cluster.simulator.controlnets.services import ControlNetRows, ControlNetServices
from ray_cluster.simulator.events import EventQueue, Timer
from ray_cluster.simulator.noise import Device


@dataclass(frozen=True, slots=True)
class StepRun:
    """Steps that a batch takes one after the other.

    Attributes:
        ends_s: instants at which each of them ends.
    """

    start_s: float
    request_ids: tuple[str, ...]
    ends_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """What a replica calls.

    Attributes:
        view_of: returns a request with its client's deadline.
        report: sends events to the dispatcher.
        poll_anew: renews the poll when the free slots are others, without a report.
        score_of: returns a request's confidence; of a replica that scores images, and makes none.
    """

    view_of: Callable[[str], RequestView]
    report: Callable[[Sequence[ReplicaEvent]], None]
    watch: Callable[[str, StepRun], None]
    poll_anew: Callable[[], None]
    score_of: Callable[[str], float] | None = None


@dataclass(slots=True)
class SimulatedRow:
    """A request that a replica holds.

    Attributes:
        view: as of the last decision; see :meth:`row_view`.
        steps_done: so far.
        last_round: the replica's number of steps when it was last in one, or could first have been;
            None while it is encoded.
        is_preempted: whether it is to be returned at the next step boundary.
    """

    lease: Lease
    view: RequestView
    steps_done: int
    last_round: int | None = None
    is_preempted: bool = False

    def row_view(self, num_rounds: int) -> RowView:
        """What a policy gets, once the replica has made so many steps."""
        if self.view.steps_done != self.steps_done:
            self.view = replace(self.view, steps_done=self.steps_done)
        assert self.last_round is not None
        return RowView(self.view, num_rounds - self.last_round)


class SimulatedReplica:
    """Steps what it is leased, on one device.

    Args:
        registration: for the dispatcher.
        device: knows how long steps really take.
        policy: decides between two steps.
        host: what it calls.
        services: devices that run its requests' ControlNets; None where its own does.
        cap: most images of a batch, of a replica that begins one only when the last has ended, and
            leases no sooner, so that the queue is the dispatcher's; None where rows join at steps.
    """

    def __init__(
        self,
        registration: Registration,
        device: Device,
        policy: StepPolicy,
        events: EventQueue,
        *,
        host: Host,
        services: ControlNetServices | None = None,
        cap: int | None = None,
    ) -> None:
        self.registration = registration
        self._device = device
        self._policy = policy
        self._events = events
        self._host, self._cap = host, cap
        # since the last batch began: their slots are for others
        self._has_dropped = False
        self._on_drained: Callable[[], None] | None = None
        self._rows: dict[str, SimulatedRow] = {}
        self._run: StepRun | None = None
        # the end of what the device does, and the alarm of an idle one
        self._timer: Timer | None = None
        self._alarm: Timer | None = None
        self._num_rounds = 0
        self._controls = None if services is None else ControlNetRows(services, self._answered)
        # whether the present step waits for residuals, and until when it may
        self._is_waiting = False
        self._waits_until_s = -math.inf
        self.busy_s = 0.0

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id

    @property
    def num_free(self) -> int:
        """Free slots: of one that makes whole batches those of the next, if none is under way."""
        if self.is_draining:
            return 0
        if self._cap is None:
            return self.registration.max_in_flight - len(self._rows)
        return max(0, self._cap - len(self._rows)) if self._has_dropped or not self._rows else 0

    @property
    def capacity(self) -> Capacity | None:
        """What it holds and batches, where that is not as it registered."""
        return None if self._cap is None else Capacity(self._cap, self._cap)

    @property
    def is_draining(self) -> bool:
        """Whether it leases nothing any more."""
        return self._on_drained is not None

    def set_cap(self, cap: int) -> None:
        """Limit the next batches to so many images."""
        if cap != self._cap:
            self._cap = cap
            self._host.poll_anew()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Lease nothing any more; calls back once, when what is held has ended."""
        self._on_drained = on_drained
        self._host.poll_anew()
        # after leases that are on their way
        self._events.at(self._events.now_s, self._leave_if_empty)

    def _leave_if_empty(self) -> None:
        if self._on_drained is not None and not self._rows:
            on_drained, self._on_drained = self._on_drained, lambda: None
            on_drained()

    def steps_done_by_id(self) -> dict[str, int]:
        """Progress of what it holds, with the steps of the present run that are over."""
        done = {request_id: row.steps_done for request_id, row in self._rows.items()}
        if self._run is not None:
            steps = bisect_left(self._run.ends_s, self._events.now_s)
            done |= {one: done[one] + steps for one in self._run.request_ids if one in done}
        return done

    def take(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            request_id = lease.request.request_id
            view = self._host.view_of(request_id)
            self._rows[request_id] = SimulatedRow(lease, view, view.steps_done)
            prepare_s = self._device.prepare_s(request_id, self._events.now_s)
            self._events.after(prepare_s, partial(self._ready, lease))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop rows; a running step goes on without effect on them."""
        dropped = [
            self._leave(request_id) for request_id in request_ids if request_id in self._rows
        ]
        if dropped:
            self._cut_short()

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Return rows with their progress at the next step boundary."""
        stepping = self._run.request_ids if self._run is not None else ()
        for row in [self._rows[one] for one in request_ids if one in self._rows]:
            row.is_preempted = True
            if row.view.request_id in stepping:
                self._cut_short()
            elif not self._is_made(row):
                self._return([row])

    def _is_made(self, row: SimulatedRow) -> bool:
        return row.steps_done == row.view.num_steps

    def _return(self, rows: Sequence[SimulatedRow]) -> None:
        for row in rows:
            self._leave(row.view.request_id)
        self._host.report([_returned(row) for row in rows])

    def _leave(self, request_id: str) -> SimulatedRow:
        """Let go of a row, and of what was asked for it."""
        row = self._rows.pop(request_id)
        if self._controls is not None:
            self._controls.drop(row.view)
        return row

    def die(self) -> None:
        for request_id in list(self._rows):
            self._leave(request_id)
        if self._run is not None:
            self.busy_s += self._events.now_s - self._run.start_s
        if self._timer is not None:
            self._timer.call_off()
        self._call_off_alarm()
        self._run = self._timer = None

    def _call_off_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.call_off()
        self._alarm = None

    def _ready(self, lease: Lease) -> None:
        row = self._rows.get(lease.request.request_id)
        if row is None or row.lease is not lease:
            return
        row.last_round = self._num_rounds + self._cut_short()
        self._decide_soon()

    def _decide_soon(self) -> None:
        """Decide after all other events of this instant, unless the device is busy."""
        if self._timer is None and self._rows:
            self._timer = self._events.at(self._events.now_s, self._decide)

    def _cut_short(self) -> int:
        """End the present run after the running step; return its number of steps."""
        run, now_s = self._run, self._events.now_s
        if run is None or self._timer is None:
            return 0
        num_steps = bisect_left(run.ends_s, now_s) + 1
        if num_steps < len(run.ends_s):
            self._run = replace(run, ends_s=run.ends_s[:num_steps])
            self._timer.call_off()
            self._timer = self._events.at(run.ends_s[num_steps - 1], self._end_run)
        return num_steps

    def _decide(self) -> None:
        """Call the policy, and begin what it decides."""
        self._timer = None
        if self._cap is None:
            self._decide_now()
        elif all(row.last_round is not None for row in self._rows.values()):
            had_dropped, self._has_dropped = self._has_dropped, False
            self._decide_now()
            # what was dropped has been replaced, as far as others wait
            if self._has_dropped:
                self._decide_soon()
            elif had_dropped:
                self._host.poll_anew()

    def _decide_now(self) -> None:
        now_s = self._events.now_s
        self._call_off_alarm()
        rows = [
            row.row_view(self._num_rounds)
            for request_id, row in self._rows.items()
            if row.last_round is not None and self._has_residuals(request_id)
        ]
        if not rows:
            return
        decision = self._policy(
            StepView(
                rows=rows,
                step_cost=self.registration.step_cost,
                max_batch=self.registration.max_batch,
                now_s=now_s,
            )
        )
        if decision.dropped:
            self._drop(decision.dropped)
        if decision.request_ids:
            self._begin(decision)
        elif decision.idle_until_s is not None:
            self._alarm = self._events.at(decision.idle_until_s, self._decide_soon)

    def _drop(self, request_ids: Sequence[str]) -> None:
        rows = [self._leave(request_id) for request_id in request_ids]
        self._has_dropped = self._cap is not None
        self._host.report([_dropped(row) for row in rows])
        self._leave_if_empty()

    def _begin(self, decision: StepDecision) -> None:
        views = [self._rows[one].view for one in decision.request_ids]
        start_s = self._events.now_s
        if self._controls is not None and any(view.controls for view in views):
            self._begin_half(self._controls, decision.request_ids, views)
            return
        ends_s = self._device.step_ends_s(views, decision.num_rounds, start_s=start_s)
        ends_s = ends_s[: decision.num_held(start_s, ends_s)]
        self._run = StepRun(start_s, decision.request_ids, ends_s)
        self._timer = self._events.at(ends_s[-1], self._end_run)

    def _begin_half(
        self, controls: ControlNetRows, request_ids: tuple[str, ...], views: Sequence[RequestView]
    ) -> None:
        """Ask for residuals, and compute the first half of one step meanwhile."""
        start_s = self._events.now_s
        controls.ask(views)
        self._waits_until_s = start_s + controls.patience_s(views)
        half_s = controls.half_share * self._device.noisy_step_s(views)
        # nobody knows when it will end
        self._run = StepRun(start_s, request_ids, (math.inf,))
        self._timer = self._events.after(half_s, self._go_on)

    def _has_residuals(self, request_id: str) -> bool:
        return self._controls is None or self._controls.is_ready(request_id)

    def _answered(self) -> None:
        """Go on with what has waited for residuals that are here now."""
        if self._timer is None:
            self._decide_soon()
        elif self._is_waiting and self._has_all():
            self._timer.call_off()
            self._timer = self._events.at(self._events.now_s, self._begin_second_half)

    def _has_all(self) -> bool:
        """Whether nothing is outstanding that the present step needs; what has left needs none."""
        assert self._run is not None
        return all(map(self._has_residuals, self._run.request_ids))

    def _go_on(self) -> None:
        """The first half is computed: wait for residuals, for as long as is reasonable."""
        if self._has_all() or self._events.now_s >= self._waits_until_s:
            self._begin_second_half()
            return
        self._is_waiting = True
        self._timer = self._events.at(self._waits_until_s, self._begin_second_half)

    def _begin_second_half(self) -> None:
        """Compute it for the rows whose residuals are here; the others repeat their step."""
        run, self._is_waiting = self._run, False
        assert run is not None
        assert self._controls is not None
        held = [one for one in run.request_ids if one in self._rows]
        kept = [one for one in held if self._has_residuals(one)]
        late = [self._rows[one] for one in held if one not in kept]
        for row in late:
            # as if it had been in this step: it was chosen
            row.last_round = self._num_rounds + 1
        half_s = 0.0
        if kept:
            views = [self._rows[one].view for one in kept]
            half_s = (1 - self._controls.half_share) * self._device.noisy_step_s(views)
        end_s = self._events.now_s + half_s
        self._run = replace(run, request_ids=tuple(kept), ends_s=(end_s,))
        self._timer = self._events.at(end_s, self._end_run)
        if leaving := [row for row in late if row.is_preempted]:
            self._return(leaving)

    def _end_run(self) -> None:
        """Count the steps, decode what is finished, and decide again."""
        run, self._run, self._timer = self._run, None, None
        assert run is not None
        num_steps = len(run.ends_s)
        self._device.took(num_steps)
        self._num_rounds += num_steps
        for request_id in run.request_ids:
            if self._controls is not None and request_id in self._rows:
                self._controls.took_step(request_id)
        if run.request_ids:
            self._host.watch(self.replica_id, run)
        stepped = [self._rows[one] for one in run.request_ids if one in self._rows]
        for row in stepped:
            row.steps_done += num_steps
            row.last_round = self._num_rounds
        done = [row for row in stepped if self._is_made(row)]
        if leaving := [row for row in stepped if row.is_preempted and not self._is_made(row)]:
            self._return(leaving)
        decode_s = self._device.decode_s([row.view for row in done])
        self.busy_s += self._events.now_s + decode_s - run.start_s
        self._timer = self._events.after(decode_s, partial(self._report_finished, done))

    def _report_finished(self, done: Sequence[SimulatedRow]) -> None:
        """Report what is finished and was not aborted meanwhile, and go on."""
        self._timer = None
        ended = [row for row in done if self._rows.get(row.view.request_id) is row]
        for row in ended:
            self._leave(row.view.request_id)
        if ended:
            self._host.report([self._end_of(row) for row in ended])
        self._decide_soon()
        self._leave_if_empty()

    def _end_of(self, row: SimulatedRow) -> ReplicaEvent:
        request_id, fence = row.view.request_id, row.lease.fence
        if self._host.score_of is not None:
            return Scored(request_id, fence, self._host.score_of(request_id))
        return Finished(request_id, fence, ImageResult(request_id, b"", "png", Timing(), 0))


def _returned(row: SimulatedRow) -> Returned:
    return Returned(row.view.request_id, row.lease.fence, row.steps_done)


def _dropped(row: SimulatedRow) -> Failed:
    request_id = row.view.request_id
    # as if its client had aborted it
    failure = Failure(request_id, "aborted", "dropped: it would have been late", "denoise")
    return Failed(request_id, row.lease.fence, failure)
