"""Threads around one step engine: each stage runs in its own, side by side with the others.

The runner knows of threads and stages; what a step is, the engine knows; what a lease is, the
replica knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.merging import Merger
from ray_cluster.engine.batch.batch_caps import BatchLimit
from ray_cluster.engine.device.streams import StageStream, finish_queued
from ray_cluster.engine.edits.template import EncodedImage
from ray_cluster.engine.models.loading import LoadedModel, encode_images
from ray_cluster.engine.stages.batch_stage import BatchStage
from ray_cluster.engine.stages.decode_stage import DecodeStage
from ray_cluster.engine.stages.encode_stage import LoraArrivals, encode_tickets, is_begun
from ray_cluster.engine.stages.events import Broken, Died, Exported, RunnerEvent, Stepped
from ray_cluster.engine.stages.stage_thread import StageThread
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.checkpoints import Checkpoints, ExportInterval, StateSink
from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.engine.step.step_commands import StepCommands
from ray_cluster.engine.step.step_engine import StepEngine, StepReport
from ray_cluster.errors import InvalidRequest, RequestFailed, Stage
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.policies.steps.checkpointing import steps_between_exports
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest

T = TypeVar("T")
_IDLE_WAKE_S = 0.5


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
        self.model = model
        self.merger = merger
        self._engine = engine
        self._on_event: Callable[[RunnerEvent], None] = lambda _event: None
        self.clock = clock
        self._limit = max_batch if isinstance(max_batch, BatchLimit) else BatchLimit(max_batch)
        self._live = LiveTickets()
        seeing, encoding, decoding = (StageStream(self.device, is_urgent=False) for _ in range(3))
        self._stepping = StageStream(self.device, is_urgent=True)
        handed_over, self._checkpoints = self._stepping.synchronize, None
        if sink is not None:
            self._checkpoints = Checkpoints(engine, self._live, sink, clock, interval, handed_over)
        self._commands = StepCommands()
        self.wake = self._commands.wake
        self._stopping = threading.Event()
        self._heartbeat_s = clock()
        self._images = BatchStage[Ticket, EncodedImage](
            is_wanted=self._live.__contains__,
            work=lambda tickets: self._seen(tickets, seeing),
            group_of=lambda ticket: ticket.request.size_px,
            on_done=self._enter_encode,
            on_error=lambda ticket, error: self._break(ticket, error, "image"),
            max_batch=self._limit,
            clock=clock,
        )
        self._encode = BatchStage[Ticket, RequestState | Conditioning](
            is_wanted=self._live.__contains__,
            work=lambda tickets: encode_tickets(model, tickets, encoding, clock()),
            group_of=is_begun,
            on_done=self._leave_encode,
            on_error=self._break_encode,
            max_batch=self._limit,
            clock=clock,
        )
        self._decode = DecodeStage(
            self._live,
            model.decoder,
            on_decoded=self._tell,
            on_previewed=self._tell,
            on_error=lambda ticket, error: self._break(ticket, error, "decode"),
            max_batch=self._limit,
            clock=clock,
            stream=decoding,
        )
        self._loras = LoraArrivals(engine, self._live, self._stepping, self._encode.put)
        self._threads = self._stage_threads((seeing, encoding, decoding), num_threads)

    def _stage_threads(
        self, streams: tuple[StageStream, StageStream, StageStream], num_threads: int
    ) -> dict[Stage, StageThread]:
        seeing, encoding, decoding = streams
        loops: tuple[tuple[Stage, Callable[[], None], StageStream], ...] = (
            ("image", self._images.run, seeing),
            ("encode", self._encode.run, encoding),
            ("denoise", self._step_loop, self._stepping),
            ("decode", self._decode.run, decoding),
        )
        return {
            name: StageThread(name, loop, stream, on_error=self._die, num_threads=num_threads)
            for name, loop, stream in loops
        }

    def call(self, stage: Stage, work: Callable[[], T]) -> T:
        """Run something in the thread of a stage before :meth:`start`; return what it returns."""
        return self._threads[stage].call(work)

    def start(self, on_event: Callable[[RunnerEvent], None]) -> None:
        """Start the work on requests.

        Args:
            on_event: called for every event, from the runner's threads; must return quickly.
        """
        self._on_event = on_event
        self._heartbeat_s = self.clock()
        for thread in self._threads.values():
            thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the threads at the next boundary; what is in flight is dropped without events."""
        self._live.take_all()
        self._stopping.set()
        for stage in (self._images, self._encode, self._decode):
            stage.close()
        self._commands.wake()
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
        silences_s = (
            self._images.silence_s,
            self._encode.silence_s,
            self.clock() - self._heartbeat_s,
            self._decode.silence_s,
        )
        for thread, silence_s in zip(self._threads.values(), silences_s, strict=True):
            if not thread.is_alive:
                raise RuntimeError(f"the {thread.name} thread has died")
            if silence_s > max_silence_s:
                raise RuntimeError(f"the {thread.name} thread is silent for {silence_s:.1f} s")

    def submit(
        self,
        request: ImageRequest,
        *,
        deadline_s: float,
        queued_s: float = 0.0,
        read_s: float = 0.0,
        state: RequestState | None = None,
        pixels: EditPixels | None = None,
        adapters: AdapterSet | None = None,
        maps: tuple[Tensor, ...] = (),
    ) -> None:
        """Take a request; with ``state`` it goes on where that was exported.

        Args:
            queued_s: seconds that it has waited before this replica had it.
            read_s: seconds that this one took to read its images; they count to encoding.
            pixels: of an edit; not needed with a state, which has what comes of them.
            adapters: of its LoRAs, bound to this model; those that start later may come later.
            maps: of its ControlNets, in their order.

        Raises:
            ValueError: a request of that id is in flight, or the state is another request's; or it
                is an edit that has neither; or a ControlNet has no map.
        """
        if state is not None and state.request != request:
            raise ValueError(f"the state given for {request} is of {state.request}")
        if request.edit is not None and state is None and pixels is None:
            raise ValueError(f"the edit {request.request_id!r} comes without its pixels")
        if len(maps) != len(request.add_ons.controls):
            raise ValueError(f"{request.request_id!r} comes with {len(maps)} maps")
        now_s = self.clock()
        ticket = Ticket(
            request,
            now_s - read_s - queued_s,
            deadline_s,
            queued_s,
            entered_s=now_s - read_s,
            pixels=pixels,
            adapters=adapters,
            maps=maps,
        )
        self._live.enter(ticket)
        if state is None and pixels is not None:
            self._images.put(ticket)
        elif state is None:
            self._encode.put(ticket)
        else:
            # its copies may be under way still
            finish_queued(self.device)
            self._enter_engine(ticket, state)

    def add_loras(self, request_id: str, adapters: AdapterSet) -> None:
        """Bring the LoRAs of a request that was submitted without; nothing if it is gone.

        Without them it waits once it has taken the steps that it takes without.
        """
        self._commands.put(lambda: self._loras.arrive(request_id, adapters))

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; returns whether it was in flight. No event follows."""
        ticket = self._live.take(request_id)
        if ticket is not None:
            self._commands.put(lambda: self._drop_row(ticket))
        return ticket is not None

    def export_all(self, timeout_s: float = 10.0) -> list[Exported]:
        """Take every request out at the next step boundary, with what has been done of it.

        Requests in the decode stage are taken too, and decoded again elsewhere.
        """
        tickets = self._live.take_all()
        at_boundary = threading.Event()

        def drop_rows() -> None:
            for ticket in tickets:
                self._drop_row(ticket)
            at_boundary.set()

        self._commands.put(drop_rows)
        # once it is stopped, nobody comes to a boundary any more
        is_safe = not self._stopping.is_set() and at_boundary.wait(timeout_s)
        return [Exported(t.request, t.state if is_safe else None) for t in tickets]

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
            if ticket is None or self._is_denoised(ticket) or not self._live.leave(ticket):
                future.set_result(None)
                return
            self._drop_row(ticket)
            future.set_result(Exported(ticket.request, ticket.state))

        self._commands.put(take)
        return future

    def _is_denoised(self, ticket: Ticket) -> bool:
        return ticket.state is not None and self._engine.is_done(ticket.state)

    def _tell(self, event: RunnerEvent) -> None:
        self._on_event(event)

    def _die(self, thread: str, error: Exception) -> None:
        self._tell(Died(thread, error))

    def _seen(self, tickets: Sequence[Ticket], stream: StageStream) -> list[EncodedImage]:
        """Encode images, and wait for them: the next stage reads them in a stream of its own."""
        pixels = [ticket.pixels for ticket in tickets if ticket.pixels is not None]
        images = encode_images(self.model, pixels)
        stream.synchronize()
        return images

    def _enter_encode(self, ticket: Ticket, image: EncodedImage) -> None:
        ticket.pixels, ticket.image = None, image
        self._encode.put(ticket)

    def _leave_encode(self, ticket: Ticket, found: RequestState | Conditioning) -> None:
        if isinstance(found, RequestState):
            self._enter_engine(ticket, found)
        else:
            self._commands.put(lambda: self._loras.encoded(ticket, found))

    def _break_encode(self, ticket: Ticket, error: Exception) -> None:
        self._break(ticket, error, "encode")
        # one that has begun without its LoRAs is stepping
        self._commands.put(lambda: self._drop_row(ticket))

    def _break(self, ticket: Ticket, error: Exception, stage: Stage) -> None:
        if not isinstance(error, RequestFailed | InvalidRequest):
            error = RequestFailed(f"{type(error).__name__}: {error}", stage)
        if self._live.leave(ticket):
            self._tell(Broken(ticket.request, error))

    def _enter_engine(self, ticket: Ticket, state: RequestState) -> None:
        now_s = self.clock()
        state.arrival_s, state.deadline_s = ticket.arrival_s, ticket.deadline_s
        state.queued_s, state.maps = ticket.queued_s, ticket.maps
        state.encode_s += now_s - ticket.entered_s
        ticket.entered_s = now_s
        ticket.state, ticket.image = state, None
        if self._is_denoised(ticket):
            # exported when it had only to be decoded
            self._decode.put_image(ticket)
            return

        def join() -> None:
            if ticket in self._live:
                self._loras.enter(ticket, state)

        self._commands.put(join)

    def _step_loop(self) -> None:
        # no local may keep a row alive while the thread waits for the next
        while not self._stopping.is_set():
            self._commands.carry_out(wait_s=0.0 if self._engine.can_step else _IDLE_WAKE_S)
            self._heartbeat_s = self.clock()
            if self._engine.can_step:
                self._step()

    def _step(self) -> None:
        report = self._engine.step()
        self._hand_on(report)
        self._tell(Stepped(report))
        if self._checkpoints is not None:
            self._checkpoints.after_step(report)
        if self.merger is not None:
            self.merger.after_step(report)

    def _hand_on(self, report: StepReport) -> None:
        now_s = self.clock()
        self._decode.put_previews(report.previews)
        for state in report.finished:
            ticket = self._live.of_state(state)
            if ticket is not None:
                state.denoise_s += now_s - ticket.entered_s
                ticket.entered_s = now_s
                self._decode.put_image(ticket)
        for failed in report.failed:
            ticket = self._live.of_state(failed.state)
            if ticket is not None:
                self._break(ticket, failed.error, "denoise")

    def _drop_row(self, ticket: Ticket) -> None:
        """Take a ticket's own row out of the engine; another one of the same id stays."""
        if ticket.state is not None and self._engine.holds(ticket.state):
            self._engine.abort(ticket.request.request_id)
            ticket.state.denoise_s += self.clock() - ticket.entered_s
