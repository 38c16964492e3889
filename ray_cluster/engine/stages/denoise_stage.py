"""The denoise stage: rows from their first step to their last, and what comes to them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.device.streams import StageStream
from ray_cluster.engine.stages.decode_stage import DecodeStage
from ray_cluster.engine.stages.events import Exported
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.engine.step.step_call import LateLoras
from ray_cluster.engine.step.step_engine import StepEngine, StepReport

_IDLE_WAKE_S = 0.5


class DenoiseStage:
    """Steps the rows of an engine, which only the thread of :meth:`run` touches.

    Args:
        live: tickets that are not in it are dropped.
        stream: in which :meth:`run` is called.
        encode: has a begun ticket's prompts encoded once more, with its LoRAs.
        decode: gets what has all its steps, and previews.
        on_error: called with a ticket whose step has failed.
        after_step: called one after the other once a step is handed on.

    Attributes:
        stopping: set by :meth:`close`.
        heartbeat_s: when the last step, or look for one, began.
    """

    def __init__(
        self,
        engine: StepEngine,
        live: LiveTickets,
        stream: StageStream,
        *,
        encode: Callable[[Ticket], None],
        decode: DecodeStage,
        on_error: Callable[[Ticket, Exception], None],
        after_step: Sequence[Callable[[StepReport], None]],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._live = live
        self._stream = stream
        self._encode = encode
        self._decode = decode
        self._on_error = on_error
        self._clock = clock
        self._after_step = after_step
        # what other threads want, done between two steps
        self._commands = SimpleQueue[Callable[[], object]]()
        self.stopping = threading.Event()
        self.heartbeat_s = clock()

    @property
    def silence_s(self) -> float:
        """Seconds since the heartbeat."""
        return self._clock() - self.heartbeat_s

    def close(self) -> None:
        """End :meth:`run` at the next step boundary."""
        self.stopping.set()
        self.wake()

    def wake(self) -> None:
        """Look at once what can go on; from any thread, as all up to :meth:`run`."""
        self._commands.put(lambda: None)

    def put(self, ticket: Ticket, found: RequestState | Conditioning) -> None:
        """Accept what was encoded: a row, or of one that is begun its prompts with its LoRAs."""
        if not isinstance(found, RequestState):
            self._commands.put(lambda: self._give_loras(ticket, found))
            return
        now_s = self._clock()
        found.arrival_s, found.deadline_s = ticket.arrival_s, ticket.deadline_s
        found.queued_s, found.maps = ticket.queued_s, ticket.maps
        found.encode_s += now_s - ticket.entered_s
        ticket.entered_s = now_s
        ticket.state, ticket.latents = found, None
        if self._engine.is_done(found):
            # exported when it had only to be decoded
            self._decode.put_image(ticket)
        else:
            self._commands.put(lambda: self._join(ticket, found))

    def add_loras(self, request_id: str, adapters: AdapterSet) -> None:
        """Bring the LoRAs of a request that was submitted without; nothing if it is gone.

        Without them it waits once it has taken the steps that it takes without.
        """
        self._commands.put(lambda: self._note_loras(request_id, adapters))

    def drop(self, *tickets: Ticket) -> threading.Event:
        """Drop the rows of tickets at the next step boundary; what is returned is set there."""
        at_boundary = threading.Event()

        def drop_rows() -> None:
            for ticket in tickets:
                self._drop_row(ticket)
            at_boundary.set()

        self._commands.put(drop_rows)
        return at_boundary

    def export(self, request_id: str) -> Future[Exported | None]:
        """Take one request out at the next step boundary, with what has been done of it.

        None comes of one that is not in flight, or that is as good as made. Once the future is
        cancelled, nothing happens.
        """
        future: Future[Exported | None] = Future()

        def take() -> None:
            if not future.set_running_or_notify_cancel():
                return
            ticket = self._live.get(request_id)
            is_denoised = ticket and ticket.state and self._engine.is_done(ticket.state)
            if ticket is None or is_denoised or not self._live.leave(ticket):
                future.set_result(None)
                return
            self._drop_row(ticket)
            future.set_result(Exported(ticket.request, ticket.state))

        self._commands.put(take)
        return future

    def run(self) -> None:
        """Step until closed; the body of the stage's thread."""
        # no local may keep a row alive while the thread waits for the next
        while not self.stopping.is_set():
            self._carry_out(wait_s=0.0 if self._engine.can_step else _IDLE_WAKE_S)
            self.heartbeat_s = self._clock()
            if self._engine.can_step:
                self._step()

    def _carry_out(self, wait_s: float) -> None:
        """Do what others want; with nothing there, wait so long for something to come."""
        with suppress(Empty):
            command = self._commands.get(timeout=wait_s)
            while True:
                command()
                command = self._commands.get_nowait()

    def _step(self) -> None:
        report, now_s = self._engine.step(), self._clock()
        self._decode.put_previews(report.previews)
        for state in report.finished:
            if (ticket := self._live.of_state(state)) is not None:
                state.denoise_s += now_s - ticket.entered_s
                ticket.entered_s = now_s
                self._decode.put_image(ticket)
        for failed in report.failed:
            if (ticket := self._live.of_state(failed.state)) is not None:
                self._on_error(ticket, failed.error)
        if report.stepped or report.failed:
            # a group's engine also looks without a step that has ended
            for call in self._after_step:
                call(report)

    def _join(self, ticket: Ticket, state: RequestState) -> None:
        """Add a row to the engine, with its LoRAs unless they start later."""
        if ticket not in self._live:
            return
        self._stream.adopt(state.tensors())
        if (adapters := ticket.adapters) is None:
            self._engine.add(state)
            return
        self._stream.adopt(adapters.tensors())
        self._engine.add(state, None if state.lacks_loras else adapters.denoiser)
        if state.lacks_loras:
            self._prepare_loras(ticket, adapters)

    def _note_loras(self, request_id: str, adapters: AdapterSet) -> None:
        ticket = self._live.get(request_id)
        if ticket is None or ticket.adapters is not None:
            return
        ticket.adapters = adapters
        if ticket.state is not None and self._engine.holds(ticket.state):
            self._stream.adopt(adapters.tensors())
            self._prepare_loras(ticket, adapters)

    def _prepare_loras(self, ticket: Ticket, adapters: AdapterSet) -> None:
        if adapters.prompts is None:
            self._give_loras(ticket, None)
        else:
            self._encode(ticket)

    def _give_loras(self, ticket: Ticket, conditioning: Conditioning | None) -> None:
        """Give a row its LoRAs, with its prompts by them if they change these."""
        if ticket not in self._live or ticket.state is None or ticket.adapters is None:
            return
        if conditioning is not None:
            self._stream.adopt(conditioning.tensors().values())
        self._engine.add_loras(ticket.state, LateLoras(ticket.adapters.denoiser, conditioning))

    def _drop_row(self, ticket: Ticket) -> None:
        """Take a ticket's own row out of the engine; another one of the same id stays."""
        if ticket.state is not None and self._engine.holds(ticket.state):
            self._engine.abort(ticket.request.request_id)
            ticket.state.denoise_s += self._clock() - ticket.entered_s
