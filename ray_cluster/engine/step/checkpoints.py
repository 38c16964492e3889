"""Copies of rows, every few steps, for a state store."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine, StepReport
from ray_cluster.errors import MODEL_ERRORS
from ray_cluster.observability.logs import bound, fields_of, without_prompts

logger = logging.getLogger(__name__)

ExportInterval = Callable[[float, float], int | None]
"""Steps of a row between two exports, from seconds per row and step and seconds per export."""

# steps and copies over which costs are averaged
_WINDOW = 64


class StateSink(Protocol):
    """Keeps states in another thread; every call returns at once."""

    @property
    def cost_s(self) -> float | None:
        """CPU seconds that keeping one state takes; None before that was measured."""

    def is_busy(self, request_id: str) -> bool:
        """Whether a state of that request is still to be kept."""

    def probe(self, state: RequestState) -> None:
        """Measure what keeping that state would cost."""

    def keep(self, state: RequestState, is_wanted: Callable[[], bool]) -> None:
        """Store a state that nothing else changes, if it is still wanted when its turn comes."""


class Checkpoints:
    """Exports copies of an engine's rows, in its step thread, between two steps.

    A row is copied every ``num_steps`` of its steps, which follows what steps and exports are
    measured to cost, but not while its last copy is still to be kept.

    Args:
        sink: where the copies go.
        clock: monotonic seconds.
        interval: the policy.
        handed_over: waits for what the step thread has queued; the sink reads in another thread.

    Attributes:
        num_steps: steps of a row between two exports of it; None while there are none. May be read
            in any thread.
    """

    def __init__(
        self,
        engine: StepEngine,
        live: LiveTickets,
        sink: StateSink,
        clock: Callable[[], float],
        interval: ExportInterval,
        handed_over: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._live = live
        self._sink = sink
        self._clock = clock
        self._interval = interval
        self._handed_over = handed_over
        self._steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._num_rows: deque[int] = deque(maxlen=_WINDOW)
        self._copies_s: deque[float] = deque(maxlen=_WINDOW)
        self._is_probed = False
        self.num_steps: int | None = None

    def _choose(self) -> int | None:
        keep_s = self._sink.cost_s
        if keep_s is None or not self._copies_s or not self._num_rows:
            return None
        row_step_s = sum(self._steps_s) / sum(self._num_rows)
        return self._interval(row_step_s, keep_s + sum(self._copies_s) / len(self._copies_s))

    def after_step(self, report: StepReport) -> None:
        """Take in a step, and export the rows of it for which it is time."""
        if not report.stepped:
            return
        self._steps_s.append(report.duration_s)
        self._num_rows.append(len(report.stepped))
        num_steps = self.num_steps = self._choose()
        for request_id in report.stepped:
            ticket = self._live.get(request_id)
            row = ticket.state if ticket is not None else None
            if ticket is None or row is None or not self._engine.holds(row):
                continue
            if not self._is_probed:
                self._probe(ticket)
            elif num_steps is not None and row.unstored_steps >= num_steps:
                self._export(ticket, row)

    def _probe(self, ticket: Ticket) -> None:
        if (copy := self._copy(ticket)) is not None:
            self._is_probed = True
            self._sink.probe(copy)

    def _export(self, ticket: Ticket, row: RequestState) -> None:
        if self._sink.is_busy(ticket.request.request_id):
            return
        if (copy := self._copy(ticket)) is not None:
            row.stored_steps = row.step_index
            self._sink.keep(copy, partial(self._live.__contains__, ticket))

    def _copy(self, ticket: Ticket) -> RequestState | None:
        started_s = self._clock()
        try:
            copy = self._engine.copy_state(ticket.request.request_id)
            self._handed_over()
        except MODEL_ERRORS as error:
            raise_if_broken(error)
            with bound(**fields_of(ticket.request)):
                text = without_prompts(str(error), ticket.request)
                logger.warning("its state is not exported: %s", text)
            return None
        now_s = self._clock()
        copy.denoise_s += now_s - ticket.entered_s
        self._copies_s.append(now_s - started_s)
        return copy
