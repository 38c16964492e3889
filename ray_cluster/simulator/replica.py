"""A simulated replica: leases requests, steps their rows as its policy decides, and reports ends.

It uses the lease protocol of live replicas. The device knows what a step costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ray_cluster.policies.step_policy import StepDecision, StepPolicy, StepView
from ray_cluster.policies.types import RequestView, RowView
from ray_cluster.protocol.leases import (
    Failed,
    Finished,
    Lease,
    Registration,
    ReplicaEvent,
    Returned,
)
from ray_cluster.requests import Failure, ImageResult, Timing
from ray_cluster.simulator.events import EventQueue, Timer
from ray_cluster.simulator.noise import Device

Report = Callable[[Sequence[ReplicaEvent]], None]
ViewOf = Callable[[str], RequestView]


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


@dataclass(frozen=True, slots=True)
class StepRun:
    """Steps that a batch takes one after the other.

    Attributes:
        ends_s: instants at which each of them ends.
    """

    start_s: float
    request_ids: tuple[str, ...]
    ends_s: tuple[float, ...]


class SimulatedReplica:
    """Steps what it is leased, on one device.

    Args:
        registration: for the dispatcher.
        device: knows how long steps really take.
        policy: decides between two steps.
        view_of: a request with its client's deadline.
        report: sends events to the dispatcher.
        watch: called after every run of steps.
    """

    def __init__(
        self,
        registration: Registration,
        device: Device,
        policy: StepPolicy,
        events: EventQueue,
        *,
        view_of: ViewOf,
        report: Report,
        watch: Callable[[str, StepRun], None] | None = None,
    ) -> None:
        self.registration = registration
        self._device = device
        self._policy = policy
        self._events = events
        self._view_of = view_of
        self._report = report
        self._watch = watch
        self._rows: dict[str, SimulatedRow] = {}
        self._run: StepRun | None = None
        # the end of what the device does, and the alarm of an idle one
        self._timer: Timer | None = None
        self._alarm: Timer | None = None
        self._num_rounds = 0
        self.busy_s = 0.0

    @property
    def replica_id(self) -> str:
        """Unique in the cell."""
        return self.registration.replica_id

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self.registration.max_in_flight - len(self._rows)

    def steps_done_by_id(self) -> dict[str, int]:
        """Progress of what it holds, with the steps of the present run that are over."""
        done = {request_id: row.steps_done for request_id, row in self._rows.items()}
        if self._run is not None:
            steps = bisect_left(self._run.ends_s, self._events.now_s)
            done |= {one: done[one] + steps for one in self._run.request_ids if one in done}
        return done

    def take(self, leases: Iterable[Lease]) -> None:
        """Begin what was leased."""
        for lease in leases:
            request_id = lease.request.request_id
            view = self._view_of(request_id)
            self._rows[request_id] = SimulatedRow(lease, view, view.steps_done)
            prepare_s = self._device.prepare_s(request_id, self._events.now_s)
            self._events.after(prepare_s, partial(self._ready, lease))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop rows; a running step goes on without effect on them."""
        dropped = [self._rows.pop(request_id, None) for request_id in request_ids]
        if any(dropped):
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
            del self._rows[row.view.request_id]
        self._report([_returned(row) for row in rows])

    def die(self) -> None:
        """Lose everything at once."""
        self._rows.clear()
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
        self._timer, now_s = None, self._events.now_s
        self._call_off_alarm()
        rows = [
            row.row_view(self._num_rounds)
            for row in self._rows.values()
            if row.last_round is not None
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
            self._alarm = self._events.at(decision.idle_until_s, self._decide)

    def _drop(self, request_ids: Sequence[str]) -> None:
        rows = [self._rows.pop(request_id) for request_id in request_ids]
        self._report([_dropped(row) for row in rows])

    def _begin(self, decision: StepDecision) -> None:
        views = [self._rows[one].view for one in decision.request_ids]
        start_s = self._events.now_s
        ends_s = self._device.step_ends_s(views, decision.num_rounds, start_s=start_s)
        self._run = StepRun(start_s, decision.request_ids, ends_s)
        self._timer = self._events.at(ends_s[-1], self._end_run)

    def _end_run(self) -> None:
        """Count the steps, decode what is finished, and decide again."""
        run, self._run, self._timer = self._run, None, None
        assert run is not None
        num_steps = len(run.ends_s)
        self._device.took(num_steps)
        self._num_rounds += num_steps
        if self._watch is not None:
            self._watch(self.replica_id, run)
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
            del self._rows[row.view.request_id]
        if ended:
            self._report([_finished(row) for row in ended])
        self._decide_soon()


def _returned(row: SimulatedRow) -> Returned:
    return Returned(row.view.request_id, row.lease.fence, row.steps_done)


def _finished(row: SimulatedRow) -> Finished:
    result = ImageResult(row.view.request_id, b"", "png", Timing(), 0)
    return Finished(row.view.request_id, row.lease.fence, result)


def _dropped(row: SimulatedRow) -> Failed:
    request_id = row.view.request_id
    # as if its client had aborted it
    failure = Failure(request_id, "aborted", "dropped: it would have been late", "denoise")
    return Failed(request_id, row.lease.fence, failure)
