"""Threads around one step engine: each stage runs in its own, side by side with the others.

The runner knows of threads and stages; what a step is, the engine knows; what a lease is, the
replica knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.merging import Merger
from ray_cluster.engine.batch.batch_caps import BatchLimit
from ray_cluster.engine.device.streams import StageStream, finish_queued
from ray_cluster.engine.edits.template import SentLatents
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.batch_stage import BatchStage
from ray_cluster.engine.stages.decode_stage import DecodeStage
from ray_cluster.engine.stages.denoise_stage import DenoiseStage
from ray_cluster.engine.stages.encode_stage import EncodeStage, encode_tickets, see_tickets
from ray_cluster.engine.stages.events import Broken, Died, Exported, RunnerEvent, Stepped
from ray_cluster.engine.stages.stage_thread import StageThread
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.checkpoints import Checkpoints, ExportInterval, StateSink
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine, StepReport
from ray_cluster.errors import InvalidRequest, RequestFailed, Stage
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.policies.steps.checkpointing import steps_between_exports
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest

T = TypeVar("T")


class EngineRunner:
    """Runs one model: requests in, pixels out.

    Every request passes encode, denoise and decode, and before them an edit has its image encoded;
    an abort is effective in all of them, in the step thread at the next step boundary.

    Args:
        model: the loaded stages.
        engine: a step engine over ``model.executor``; from :meth:`start` on only the step thread
            touches it.
        clock: monotonic seconds.
        num_threads: torch threads of each stage.
        max_batch: most prompts or images encoded or decoded together, and the engine's limit if it
            is one that :meth:`set_max_batch` sets.
        sink: gets copies of the rows at the interval that the policy says.
        merger: of the engine; None where nothing is merged.

    Attributes:
        wake, export, add_loras: see :class:`.DenoiseStage`.
    """

    def __init__(
        self,
        model: LoadedModel,
        engine: StepEngine,
        *,
        clock: Callable[[], float],
        num_threads: int = 1,
        max_batch: int | BatchLimit = 8,
        sink: StateSink | None = None,
        interval: ExportInterval = steps_between_exports,
        merger: Merger | None = None,
    ) -> None:
        self.model, self.merger = model, merger
        self._engine = engine
        self._on_event: Callable[[RunnerEvent], None] = lambda _event: None
        self.clock = clock
        self._limit = max_batch if isinstance(max_batch, BatchLimit) else BatchLimit(max_batch)
        self._live = LiveTickets()
        seeing, encoding, decoding = (StageStream(self.device, is_urgent=False) for _ in range(3))
        stepping, self._checkpoints = StageStream(self.device, is_urgent=True), None
        after_step: list[Callable[[StepReport], None]] = [lambda one: self._tell(Stepped(one))]
        if sink is not None:
            waits = stepping.synchronize
            self._checkpoints = Checkpoints(engine, self._live, sink, clock, interval, waits)
            after_step.append(self._checkpoints.after_step)
        if merger is not None:
            after_step.append(merger.after_step)
        self._decode = DecodeStage(
            self._live,
            model.decoder,
            on_event=self._tell,
            on_error=lambda ticket, error: self._break(ticket, error, "decode"),
            max_batch=self._limit,
            clock=clock,
            stream=decoding,
        )
        self._denoise = DenoiseStage(
            engine,
            self._live,
            stepping,
            encode=lambda ticket: self._encode.put(ticket),  # noqa: PLW0108 - made below
            decode=self._decode,
            on_error=lambda ticket, error: self._break(ticket, error, "denoise"),
            after_step=after_step,
            clock=clock,
        )
        self._images, self._encode = self._encoding_stages(seeing, encoding)
        self.wake, self.export = self._denoise.wake, self._denoise.export
        self.add_loras = self._denoise.add_loras
        parts: tuple[tuple[Stage, BatchStage[Any, Any] | DenoiseStage, StageStream], ...] = (
            ("image", self._images, seeing),
            ("encode", self._encode, encoding),
            ("denoise", self._denoise, stepping),
            ("decode", self._decode, decoding),
        )
        self._stages = [stage for _, stage, _ in parts]
        self._threads = {
            name: StageThread(name, stage.run, stream, on_error=self._die, num_threads=num_threads)
            for name, stage, stream in parts
        }

    def _encoding_stages(
        self, seeing: StageStream, encoding: StageStream
    ) -> tuple[BatchStage[Ticket, SentLatents], EncodeStage]:
        encode = EncodeStage(
            is_wanted=self._live.__contains__,
            work=lambda tickets: encode_tickets(self.model, tickets, encoding, self.clock()),
            group_of=lambda ticket: ticket.state is not None,
            on_done=self._denoise.put,
            on_error=lambda ticket, error: self._break(ticket, error, "encode"),
            max_batch=self._limit,
            clock=self.clock,
        )
        images = BatchStage[Ticket, SentLatents](
            is_wanted=self._live.__contains__,
            work=lambda tickets: see_tickets(self.model, tickets, seeing),
            group_of=lambda ticket: ticket.request.size_px,
            on_done=encode.put_seen,
            on_error=lambda ticket, error: self._break(ticket, error, "image"),
            max_batch=self._limit,
            clock=self.clock,
        )
        return images, encode

    def call(self, stage: Stage, work: Callable[[], T]) -> T:
        """Run something in the thread of a stage before :meth:`start`; return what it returns."""
        return self._threads[stage].call(work)

    def start(self, on_event: Callable[[RunnerEvent], None]) -> None:
        """Start the work on requests.

        Args:
            on_event: called for every event, from the runner's threads; must return quickly.
        """
        self._on_event = on_event
        self._denoise.heartbeat_s = self.clock()
        for thread in self._threads.values():
            thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the threads at the next boundary; what is in flight is dropped without events."""
        self._live.take_all()
        for stage in self._stages:
            stage.close()
        for thread in self._threads.values():
            thread.join(timeout_s)

    @property
    def device(self) -> torch.device:
        """Where the latents of imported states must be."""
        return self.model.executor.device

    @property
    def num_in_flight(self) -> int:
        """Requests anywhere between submission and their last event."""
        return len(self._live)

    @property
    def steps_done_by_id(self) -> dict[str, int]:
        """Denoising steps done by every request in flight."""
        return self._live.steps_done_by_id()

    @property
    def step_cost(self) -> StepCost:
        """What a step costs at present."""
        return self._engine.step_cost

    def set_max_batch(self, wanted: int) -> int:
        """Set how many requests are stepped together at most; return what memory allows of it.

        Effective at the next step; from any thread.
        """
        return self._limit.set(wanted)

    @property
    def steps_between_exports(self) -> int | None:
        """Steps of a row between two exports of it; None while there are none."""
        return self._checkpoints.num_steps if self._checkpoints is not None else None

    def check_alive(self, max_silence_s: float) -> None:
        """Raise RuntimeError when a thread has died or hangs in a piece of work."""
        for thread, stage in zip(self._threads.values(), self._stages, strict=True):
            if not thread.is_alive:
                raise RuntimeError(f"the {thread.name} thread has died")
            if (silence_s := stage.silence_s) > max_silence_s:
                raise RuntimeError(f"the {thread.name} thread is silent for {silence_s:.1f} s")

    def submit(
        self,
        request: ImageRequest,
        *,
        deadline_s: float,
        queued_s: float = 0.0,
        read_s: float = 0.0,
        state: RequestState | None = None,
        pixels: SentPixels | None = None,
        adapters: AdapterSet | None = None,
        maps: tuple[Tensor, ...] = (),
    ) -> None:
        """Take a request; with ``state`` it goes on where that was exported.

        Args:
            queued_s: seconds that it has waited before this replica had it.
            read_s: seconds that this one took to read its images; they count to encoding.
            pixels: of an edit or references; not needed with a state, which has what comes of them.
            adapters: of its LoRAs, bound to this model; those that start later may come later.
            maps: of its ControlNets, in their order.

        Raises:
            ValueError: a request of that id is in flight, or the state is another request's; or it
                has neither the images that it is made from; or a ControlNet has no map.
        """
        if state is not None and state.request != request:
            raise ValueError(f"the state given for {request} is of {state.request}")
        sent = pixels or SentPixels()
        is_edit = request.edit is not None and sent.edit is None
        if state is None and (is_edit or len(sent.references) != len(request.references)):
            raise ValueError(f"{request.request_id!r} comes without the pixels it is made from")
        if len(maps) != len(request.add_ons.controls):
            raise ValueError(f"{request.request_id!r} comes with {len(maps)} maps")
        entered_s = self.clock() - read_s
        ticket = Ticket(
            request,
            entered_s - queued_s,
            deadline_s,
            queued_s,
            entered_s,
            pixels,
            adapters=adapters,
            maps=maps,
        )
        self._live.enter(ticket)
        if state is None and (sent.edit is not None or sent.references):
            self._images.put(ticket)
        elif state is None:
            self._encode.put(ticket)
        else:
            # its copies may be under way still
            finish_queued(self.device)
            self._denoise.put(ticket, state)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; returns whether it was in flight. No event follows."""
        if (ticket := self._live.take(request_id)) is not None:
            self._denoise.drop(ticket)
        return ticket is not None

    def export_all(self, timeout_s: float = 10.0) -> list[Exported]:
        """Take every request out at the next step boundary, with what has been done of it.

        Requests in the decode stage are taken too, and decoded again elsewhere.
        """
        tickets = self._live.take_all()
        at_boundary = self._denoise.drop(*tickets)
        # once it is stopped, nobody comes to a boundary any more
        is_safe = not self._denoise.stopping.is_set() and at_boundary.wait(timeout_s)
        return [Exported(t.request, t.state if is_safe else None) for t in tickets]

    def _tell(self, event: RunnerEvent) -> None:
        self._on_event(event)

    def _die(self, thread: str, error: Exception) -> None:
        self._tell(Died(thread, error))

    def _break(self, ticket: Ticket, error: Exception, stage: Stage) -> None:
        if not isinstance(error, RequestFailed | InvalidRequest):
            error = RequestFailed(f"{type(error).__name__}: {error}", stage)
        if self._live.leave(ticket):
            self._tell(Broken(ticket.request, error))
        # one that has begun without its LoRAs, and is encoded once more, is stepping
        self._denoise.drop(ticket)
