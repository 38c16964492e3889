"""One group of GPUs on a virtual clock: requests step on degrees that a planner chooses.

A denoising step is the quantum: a new target takes effect at the request's next step boundary, and
GPUs that it releases stay idle until a waiting request takes them. The service's own
:mod:`ray_cluster.policies.sequence_parallel.sets` says which GPUs that are. Steps without a change
pass in one event: only the next change, or the last step's end, is in the queue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ray_cluster.policies.sequence_parallel.sets import Seat, launches, seat
from ray_cluster.policies.sequence_parallel.types import (
    DegreeMenu,
    GroupRequest,
    GroupView,
    Planner,
    RoundDecision,
)
from ray_cluster.simulator.events import EventQueue, Timer


@dataclass(frozen=True, slots=True)
class GroupTask:
    """A request as the simulator knows it.

    Attributes:
        menu: step times that a planner gets.
        true_step_s: real step times, by level of that menu.
        pace: running sums of each step's time over the usual, from 0: without noise 0, 1, ..., n.
    """

    request_id: int
    menu: DegreeMenu
    arrival_s: float
    deadline_s: float
    true_step_s: tuple[float, ...]
    pace: Sequence[float]

    @property
    def num_steps(self) -> int:
        return len(self.pace) - 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of a request without a change, on certain GPUs.

    Attributes:
        begin_s: instant from which it held the GPUs.
        first_step_s: beginning of its first step: later than that after a switch.
        first_step: number of that step.
    """

    request_id: int
    gpus: tuple[int, ...]
    begin_s: float
    first_step_s: float
    end_s: float
    first_step: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """How a request ended.

    Attributes:
        finish_s: instant of the end, with its tail; None if it was dropped.
        gpu_s: GPU-seconds that it held.
        num_switches: changes of its GPUs and resumptions.
    """

    task: GroupTask
    finish_s: float | None
    gpu_s: float
    num_switches: int

    @property
    def is_on_time(self) -> bool:
        return self.finish_s is not None and self.finish_s <= self.task.deadline_s + 1e-9


@dataclass(slots=True)
class _Job:
    """A request under way.

    Attributes:
        target: GPUs that it is to have from its next boundary on, and `place` which.
        held: where it steps, or stepped last.
        level: of its menu, at which it steps; -1 while it waits.
    """

    task: GroupTask
    steps_done: int = 0
    target: int = 0
    place: range | None = None
    held: range | None = None
    level: int = -1
    begin_s: float = 0.0
    first_step_s: float = 0.0
    gpu_s: float = 0.0
    num_switches: int = 0
    is_dropped: bool = False
    timer: Timer | None = field(default=None, repr=False)

    @property
    def is_stepping(self) -> bool:
        return self.level >= 0

    @property
    def degree(self) -> int:
        """GPUs that it steps on; 0 while it waits."""
        return self.task.menu.degrees[self.level] if self.is_stepping else 0

    def step_end_s(self, step: int) -> float:
        """Instant at which a step of the present stretch ends (numbered from 1)."""
        pace = self.task.pace
        return self.first_step_s + self.task.true_step_s[self.level] * (
            pace[step] - pace[self.steps_done]
        )

    def step_in_flight(self, now_s: float) -> int:
        """The step of the present stretch that runs at an instant (numbered from 1)."""
        task, first = self.task, self.steps_done
        passed = (now_s - self.first_step_s) / task.true_step_s[self.level] + task.pace[first]
        return max(first + 1, min(bisect_right(task.pace, passed), task.num_steps))


class SimulatedGroup:
    """A group of GPUs that serves requests as its planner decides.

    Attributes:
        stretches: what ran where and when; empty if that is not recorded.
    """

    def __init__(
        self,
        events: EventQueue,
        planner: Planner,
        *,
        num_gpus: int,
        switch_s: float,
        on_end: Callable[[GroupOutcome], None],
        records: bool = False,
    ) -> None:
        self._events, self._planner = events, planner
        self._num_gpus, self._switch_s, self._on_end = num_gpus, switch_s, on_end
        self._jobs: dict[int, _Job] = {}
        self._look_again: Timer | None = None
        self._look_again_s = 0.0
        self.stretches: list[Stretch] = []
        self._records = records

    @property
    def num_running(self) -> int:
        """Requests that have come and not ended."""
        return len(self._jobs)

    def add(self, task: GroupTask) -> None:
        self._jobs[task.request_id] = _Job(task)
        self._decide()

    def _decide(self) -> None:
        view = self._view()
        decision = self._planner(view)
        self._plan_look(decision)
        for request, degree in zip(view.requests, decision.degrees, strict=True):
            self._jobs[request.request_id].target = degree
        for request_id in decision.dropped:
            self._drop(self._jobs[request_id])
        jobs = tuple(self._jobs.values())
        places = seat([_seat_of(job) for job in jobs], self._num_gpus)
        for job, place in zip(jobs, places, strict=True):
            job.place = place
            if job.is_stepping:
                self._set_timer(job)
        for job, gpus in self._launches():
            self._start(job, gpus)

    def _plan_look(self, decision: RoundDecision) -> None:
        if self._look_again is not None:
            self._look_again.call_off()
            self._look_again = None
        self._look_again_s = decision.look_again_s
        if self._jobs and decision.look_again_s < float("inf"):
            self._look_again = self._events.at(decision.look_again_s, self._decide_again)

    def _decide_again(self) -> None:
        if self._jobs:
            self._decide()

    def _view(self) -> GroupView:
        now_s = self._events.now_s
        return GroupView(
            self._num_gpus,
            now_s,
            tuple(self._seen(job, now_s) for job in self._jobs.values() if not job.is_dropped),
            self._switch_s,
            self._look_again_s,
        )

    def _seen(self, job: _Job, now_s: float) -> GroupRequest:
        task, steps, ready_s = job.task, job.steps_done, 0.0
        if job.is_stepping:
            steps = job.step_in_flight(now_s)
            began_s = job.step_end_s(steps - 1)
            ready_s = max(now_s, began_s + task.menu.step_s[job.level])
        return GroupRequest(
            task.request_id,
            task.menu,
            task.num_steps - steps,
            task.arrival_s,
            task.deadline_s,
            job.held is not None,
            job.degree,
            job.target,
            ready_s,
        )

    def _set_timer(self, job: _Job) -> None:
        """Wait for the job's next boundary if something is to change there, else for its end."""
        if job.timer is not None:
            job.timer.call_off()
        self._wait(job, job.step_in_flight(self._events.now_s))

    def _wait(self, job: _Job, step: int) -> None:
        """Wait for the end of a step of the present stretch, or the last if nothing changes."""
        if job.place == job.held and not job.is_dropped:
            step = job.task.num_steps
        job.timer = self._events.at(job.step_end_s(step), partial(self._at_boundary, job, step))

    def _at_boundary(self, job: _Job, step: int) -> None:
        job.timer = None
        if step == job.task.num_steps or job.is_dropped:
            self._release(job, step)
            self._end(job, finished=step == job.task.num_steps)
            return
        begun = self._launches(job)
        goes_on = any(one is job and gpus == job.held for one, gpus in begun)
        if goes_on:
            self._wait(job, step + 1)
        else:
            self._release(job, step)
        for one, gpus in begun:
            if one is not job or not goes_on:
                self._start(one, gpus)

    def _launches(self, at_boundary: _Job | None = None) -> list[tuple[_Job, range]]:
        """Return which requests begin a step now; of those that step, one may be at a boundary."""
        jobs = tuple(self._jobs.values())
        seats = [_seat_of(job, is_at_boundary=job is at_boundary) for job in jobs]
        return [(jobs[index], gpus) for index, gpus in launches(seats, [job.place for job in jobs])]

    def _start(self, job: _Job, gpus: range) -> None:
        now_s, begun = self._events.now_s, job.held is not None
        job.held = gpus
        job.level = job.task.menu.degrees.index(len(gpus))
        job.begin_s = now_s
        job.first_step_s = now_s + self._switch_s * begun
        job.num_switches += begun
        self._wait(job, job.steps_done + 1)

    def _release(self, job: _Job, step: int) -> None:
        now_s = self._events.now_s
        if self._records:
            self.stretches.append(
                Stretch(
                    job.task.request_id,
                    tuple(job.held or ()),
                    job.begin_s,
                    job.first_step_s,
                    now_s,
                    job.steps_done,
                    step - job.steps_done,
                )
            )
        job.gpu_s += (now_s - job.begin_s) * job.degree
        job.steps_done, job.level = step, -1

    def _drop(self, job: _Job) -> None:
        """Drop a request: at once, or at its next boundary."""
        job.is_dropped, job.target = True, 0
        if not job.is_stepping:
            self._close(job, None)

    def _end(self, job: _Job, *, finished: bool) -> None:
        finish_s = self._events.now_s + job.task.menu.tail_s if finished else None
        self._close(job, finish_s)
        self._decide_again()

    def _close(self, job: _Job, finish_s: float | None) -> None:
        del self._jobs[job.task.request_id]
        self._on_end(GroupOutcome(job.task, finish_s, job.gpu_s, job.num_switches))


def _seat_of(job: _Job, *, is_at_boundary: bool = False) -> Seat:
    is_stepping = job.is_stepping and not is_at_boundary
    return Seat(job.task.request_id, job.target, job.held, is_stepping=is_stepping)
