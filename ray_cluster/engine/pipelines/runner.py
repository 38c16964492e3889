"""One thread that makes images by calls, one at a time, behind the face of an engine's runner.

What it owns: the queue of calls, the call under way, and what calls cost. A call ends at the
end of a step at the earliest, where its pipeline says when that is; else when it is through.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.device.streams import StageStream
from ray_cluster.engine.pipelines.loading import CalledPipeline
from ray_cluster.engine.stages.events import (
    Broken,
    Decoded,
    Died,
    Exported,
    RunnerEvent,
    Stepped,
)
from ray_cluster.engine.stages.stage_thread import StageThread
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.step_engine import StepReport
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepView
from ray_cluster.policies.types import RequestView, RowView, StepCost
from ray_cluster.requests import ImageRequest, Timing

T = TypeVar("T")

_IDLE_WAKE_S = 0.5
# of what a step, or a call that does not say when one ends, is expected to take
_SLOWEST = 10.0


class _Abandoned(BaseException):
    """Ends a call whose image nobody wants any more; no pipeline handles it."""


class _Call:
    """A call under way: instants of its begin and of the ends of its steps."""

    def __init__(self, ticket: Ticket, view: RequestView, now_s: float) -> None:
        self.ticket, self.work = ticket, work_of([view])
        self.began_s = self.step_ended_s = self.first_ended_s = now_s
        self.steps_done = 0


class CallRunner:
    """Makes images with one pipeline: requests in, pixels out; see :class:`.EngineRunner`.

    Args:
        model: called in the runner's thread alone.
        costs: of steps; corrected by those that are taken.
        clock: monotonic seconds.
        num_threads: torch threads of the pipeline.
    """

    # nothing is merged, and nothing is stored of an image that is not done
    merger = None
    steps_between_exports = None

    def __init__(
        self,
        model: CalledPipeline,
        costs: StepCosts,
        *,
        clock: Callable[[], float],
        num_threads: int = 1,
    ) -> None:
        self.model, self.clock, self._costs = model, clock, costs
        self._on_event: Callable[[RunnerEvent], None] = lambda _event: None
        self._live = LiveTickets()
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []
        self._call: _Call | None = None
        self._is_stopping = False
        self._heartbeat_s = clock()
        stream = StageStream(model.device, is_urgent=True)
        self._thread = StageThread(
            "call", self._run, stream, on_error=self._die, num_threads=num_threads
        )

    def call(self, work: Callable[[], T]) -> T:
        """Run something in the thread before :meth:`start`; return what it returns."""
        return self._thread.call(work)

    def start(self, on_event: Callable[[RunnerEvent], None]) -> None:
        """Start to make images; what it is given is called from the thread."""
        self._on_event = on_event
        self._heartbeat_s = self.clock()
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop at the next end of a step; what is in flight is dropped without events."""
        self._live.take_all()
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes."""
        return self.model.device

    @property
    def step_cost(self) -> StepCost:
        """What a step costs at present."""
        return self._costs.current

    @property
    def steps_done_by_id(self) -> dict[str, int]:
        """Denoising steps done by every request in flight: of all but one, none."""
        found = self._live.steps_done_by_id()
        call = self._call
        if call is not None and call.ticket in self._live:
            found[call.ticket.request.request_id] = call.steps_done
        return found

    def set_max_batch(self, _wanted: int) -> int:
        """Return how many images are made together."""
        return 1

    def check_alive(self, max_silence_s: float) -> None:
        """Raise RuntimeError when the thread has died or hangs in a call."""
        if not self._thread.is_alive:
            raise RuntimeError("the call thread has died")
        silence_s, call = self.clock() - self._heartbeat_s, self._call
        if call is not None:
            request, cost = call.ticket.request, self.step_cost
            silent_steps = 1 if self.model.facts.callback else request.num_steps
            expected_s = silent_steps * step_s(cost, call.work)
            # before the first and after the last step, it reads and decodes
            expected_s += cost.decode_per_megapixel_s * math.prod(request.size_px) / 1e6
            max_silence_s = max(max_silence_s, _SLOWEST * expected_s)
        if silence_s > max_silence_s:
            raise RuntimeError(f"the call thread is silent for {silence_s:.1f} s")

    def submit(
        self,
        request: ImageRequest,
        *,
        deadline_s: float,
        queued_s: float = 0.0,
        read_s: float = 0.0,
        state: object = None,
        pixels: SentPixels | None = None,
        adapters: object = None,
        maps: tuple[object, ...] = (),
    ) -> None:
        """Take a request, from its beginning on; arguments are those of an engine's runner.

        Raises:
            InvalidRequest: it has add-ons, or images that this model makes nothing of.
            ValueError: a request of that id is in flight, or comes without its images.
        """
        del state, read_s
        facts, sent = self.model.facts, pixels or SentPixels()
        is_edit, is_looking = request.edit is not None, bool(request.references)
        is_other = (is_edit and facts.edits is None) or (is_looking and facts.looks is None)
        if adapters is not None or maps or is_other:
            raise InvalidRequest(
                f"The model {request.model!r} is run call by call: it takes no LoRAs, no "
                "ControlNets, and only the images that GET /v1/models says.",
                param="model",
            )
        if is_edit == (sent.edit is None) or len(sent.references) != len(request.references):
            raise ValueError(f"{request.request_id!r} comes without the pixels it is made from")
        now_s = self.clock()
        ticket = Ticket(request, now_s - queued_s, deadline_s, queued_s, now_s, pixels)
        self._live.enter(ticket)
        with self._changed:
            self._waiting.append(ticket)
            self._changed.notify()

    def add_loras(self, request_id: str, adapters: object) -> None:
        """Nothing: no request here has any."""

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; returns whether it was in flight. No event follows."""
        return self._live.take(request_id) is not None

    def export(self, request_id: str) -> Future[Exported | None]:
        """Take one request out, with nothing of what has been done; None if it is as good as made
        or not here."""
        future: Future[Exported | None] = Future()
        ticket, call = self._live.get(request_id), self._call
        is_made = call is not None and call.ticket is ticket and _is_denoised(call)
        if ticket is None or is_made or not self._live.leave(ticket):
            future.set_result(None)
        else:
            future.set_result(Exported(ticket.request, None))
        return future

    def export_all(self, timeout_s: float = 10.0) -> list[Exported]:
        """Take every request out, with nothing of what has been done."""
        del timeout_s
        return [Exported(ticket.request, None) for ticket in self._live.take_all()]

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                self._make(ticket)
            except _Abandoned:
                pass
            except InvalidRequest as error:
                self._break(ticket, error)
            except MODEL_ERRORS as error:
                raise_if_broken(error)
                message = f"{type(error).__name__}: {error}"
                self._break(ticket, RequestFailed(message, "denoise"))
            finally:
                self._call = None
                del ticket

    def _next(self) -> Ticket | None:
        """Wait for the next call's ticket; None once it is to stop."""
        with self._changed:
            while not self._is_stopping:
                self._heartbeat_s = self.clock()
                self._waiting = [one for one in self._waiting if one in self._live]
                if self._waiting:
                    return self._waiting.pop(self._first())
                self._changed.wait(_IDLE_WAKE_S)
        return None

    def _first(self) -> int:
        """Return which waiting ticket is next, by the policy of steps."""
        rows = [RowView(_view(one), waited_rounds=0) for one in self._waiting]
        view = StepView(rows, self.step_cost, 1, self.clock())
        (first, *_) = mixed_batches(view).request_ids
        return [row.request.request_id for row in rows].index(first)

    def _make(self, ticket: Ticket) -> None:
        request = ticket.request
        self.model.check_prompts(request)
        self._call = call = _Call(ticket, _view(ticket), self.clock())
        pixels = self.model.make(request, lambda: self._step_ended(call), ticket.pixels)
        now_s = self.clock()
        timing = self._timing(call, now_s)
        if self.model.facts.callback is None:
            self._observe(call, timing.denoise_s / request.num_steps)
        if self._live.leave(ticket):
            self._on_event(Decoded(request, pixels, timing))

    def _step_ended(self, call: _Call) -> None:
        now_s = self._heartbeat_s = self.clock()
        seconds, call.step_ended_s = now_s - call.step_ended_s, now_s
        call.steps_done += 1
        if call.steps_done == 1:
            # it has read the prompt, too
            call.first_ended_s = now_s
        else:
            self._observe(call, seconds)
        if call.ticket not in self._live:
            raise _Abandoned

    def _observe(self, call: _Call, seconds: float) -> None:
        request = call.ticket.request
        self._costs.observe(call.work, seconds)
        self._on_event(Stepped(StepReport((request.request_id,), (), duration_s=seconds)))

    def _timing(self, call: _Call, now_s: float) -> Timing:
        """Return where a call's seconds have gone, as far as its steps tell."""
        ticket, between = call.ticket, call.steps_done - 1
        queued_s = ticket.queued_s + call.began_s - ticket.entered_s
        if call.steps_done == 0:
            return Timing(
                queue_s=queued_s, encode_s=0.0, denoise_s=now_s - call.began_s, decode_s=0.0
            )
        first_s = call.first_ended_s - call.began_s
        steps_s = call.step_ended_s - call.first_ended_s
        own_s = min(first_s, steps_s / between) if between else first_s
        return Timing(
            queue_s=queued_s,
            encode_s=first_s - own_s,
            denoise_s=steps_s + own_s,
            decode_s=now_s - call.step_ended_s,
        )

    def _break(self, ticket: Ticket, error: RequestFailed | InvalidRequest) -> None:
        if self._live.leave(ticket):
            self._on_event(Broken(ticket.request, error))

    def _die(self, thread: str, error: Exception) -> None:
        self._on_event(Died(thread, error))


def _view(ticket: Ticket) -> RequestView:
    return ticket.request.view(
        arrival_s=ticket.arrival_s, deadline_s=ticket.deadline_s, steps_done=0
    )


def _is_denoised(call: _Call) -> bool:
    return call.steps_done >= call.ticket.request.num_steps
