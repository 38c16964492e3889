"""A simulated replica that makes whole images in batches, and leases only between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_cluster.policies.steps.step_policy import StepPolicy
from ray_cluster.policies.types import RequestView
from ray_cluster.protocol.leases import Registration
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Device, Hardware
from ray_cluster.simulator.replica import Report, SimulatedReplica, SimulatedRow, StepRun, ViewOf


class BatchDevice(Device):
    """Takes the seconds of a table of whole images: one step makes a batch.

    Args:
        batch_s: seconds of a batch of so many images.
    """

    def __init__(
        self, hardware: Hardware, seed: Sequence[int], batch_s: Callable[[int], float]
    ) -> None:
        super().__init__(hardware, seed)
        self._batch_s = batch_s

    def step_s(self, requests: Sequence[RequestView]) -> float:
        """Return the seconds of a batch of these requests without noise."""
        return self._batch_s(len(requests))


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a replica calls.

    Attributes:
        report: with its events.
        poll_anew: when its capacity has changed.
        on_drained: once, when it is draining and holds nothing any more.
    """

    report: Report
    poll_anew: Callable[[], None]
    on_drained: Callable[[], None]


class BatchReplica(SimulatedReplica):
    """Accepts leases only when it can begin them, so that the queue is the dispatcher's.

    Args:
        cap: most images of a batch.
    """

    def __init__(
        self,
        registration: Registration,
        device: Device,
        policy: StepPolicy,
        events: EventQueue,
        *,
        view_of: ViewOf,
        callbacks: Callbacks,
        cap: int,
        watch: Callable[[str, StepRun], None] | None = None,
    ) -> None:
        super().__init__(
            registration,
            device,
            policy,
            events,
            view_of=view_of,
            report=callbacks.report,
            watch=watch,
        )
        self._cap = cap
        self._poll_anew = callbacks.poll_anew
        self._on_drained = callbacks.on_drained
        self._has_dropped = False
        self._has_left = False
        self.is_draining = False

    @property
    def num_free(self) -> int:
        """Free slots: a whole batch, or those of requests that it has dropped."""
        if self.is_draining:
            return 0
        if not self._rows:
            return self._cap
        return max(0, self._cap - len(self._rows)) if self._has_dropped else 0

    def set_cap(self, cap: int) -> None:
        """Limit the next batches to so many images."""
        if cap != self._cap:
            self._cap = cap
            self._poll_anew()

    def drain(self) -> None:
        """Accept nothing any more, and end when what is held has ended."""
        self.is_draining = True
        self._poll_anew()
        # after leases that are on their way
        self._events.at(self._events.now_s, self._leave_if_empty)

    def _decide(self) -> None:
        """Begin when everything leased is ready, and dropped requests have been replaced."""
        if any(row.last_round is None for row in self._rows.values()):
            # the last to become ready decides again
            self._timer = None
            return
        had_dropped, self._has_dropped = self._has_dropped, False
        super()._decide()
        if self._has_dropped:
            self._decide_soon()
        elif had_dropped:
            self._poll_anew()

    def _drop(self, request_ids: Sequence[str]) -> None:
        self._has_dropped = True
        super()._drop(request_ids)
        self._leave_if_empty()

    def _report_finished(self, done: Sequence[SimulatedRow]) -> None:
        super()._report_finished(done)
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self.is_draining and not self._rows and not self._has_left:
            self._has_left = True
            self._on_drained()
