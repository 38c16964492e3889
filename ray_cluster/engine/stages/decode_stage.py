"""The decode stage: finished images first, previews in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ray_cluster.engine.batch.batch_caps import BatchLimit
from ray_cluster.engine.device.streams import StageStream
from ray_cluster.engine.stages.autoencoder import Decodes, Pixels
from ray_cluster.engine.stages.batch_stage import BatchStage
from ray_cluster.engine.stages.events import Decoded, Previewed
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.step_engine import PreviewLatents
from ray_cluster.observability.logs import bound, fields_of, without_prompts
from ray_cluster.requests import Timing

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Latents:
    """What is to be decoded of a ticket.

    Attributes:
        latents: ``[C, h, w]``.
        steps_done: the steps that a preview shows; None for the image itself.
    """

    ticket: Ticket
    latents: Tensor
    steps_done: int | None = None


class DecodeStage(BatchStage[_Latents, Pixels]):
    """Turns latents into pixels and hands them on as events.

    Finished images come before previews; a preview that fails or comes too late is dropped.

    Args:
        live: tickets that are not in it are dropped.
        on_event: gets previews, and finished images, whose tickets are not live any more.
        on_error: called with a ticket whose own image could not be decoded.
        stream: in which :meth:`run` is called.
    """

    def __init__(
        self,
        live: LiveTickets,
        decoder: Decodes,
        *,
        on_event: Callable[[Decoded | Previewed], None],
        on_error: Callable[[Ticket, Exception], None],
        max_batch: BatchLimit,
        clock: Callable[[], float],
        stream: StageStream,
    ) -> None:
        def decode(items: Sequence[_Latents]) -> list[Pixels]:
            latents = [item.latents for item in items]
            stream.adopt(latents)
            # its pixels are on the host: it has waited for the device
            return decoder.decode(latents)

        super().__init__(
            is_wanted=self._is_live,
            work=decode,
            group_of=lambda item: (item.ticket.request.width_px, item.ticket.request.height_px),
            on_done=self._hand_on,
            on_error=self._drop,
            max_batch=max_batch,
            clock=clock,
        )
        self._live = live
        self._on_event = on_event
        self._on_broken = on_error

    def put_image(self, ticket: Ticket) -> None:
        """Queue a ticket whose state has all its steps; from any thread."""
        if ticket.state is not None:
            self.put(_Latents(ticket, ticket.state.latents))

    def put_previews(self, previews: Sequence[PreviewLatents]) -> None:
        """Queue previews of rows that go on; from any thread."""
        for preview in previews:
            if (ticket := self._live.of_state(preview.state)) is not None:
                item = _Latents(ticket, preview.latents, preview.steps_done)
                self.put(item, is_urgent=False)

    def _is_live(self, item: _Latents) -> bool:
        state = item.ticket.state
        is_late = (
            item.steps_done is not None
            and state is not None
            and state.step_index >= state.request.num_steps
        )
        return item.ticket in self._live and not is_late

    def _hand_on(self, item: _Latents, pixels: Pixels) -> None:
        ticket, state = item.ticket, item.ticket.state
        if item.steps_done is not None:
            if ticket in self._live:
                self._on_event(Previewed(ticket.request, pixels, item.steps_done))
            return
        if state is None or not self._live.leave(ticket):
            return
        timing = Timing(
            queue_s=state.queued_s,
            encode_s=state.encode_s,
            denoise_s=state.denoise_s,
            decode_s=self._clock() - ticket.entered_s,
        )
        degrees = tuple(sorted(state.steps_by_degree.items()))
        self._on_event(Decoded(ticket.request, pixels, timing, degrees))

    def _drop(self, item: _Latents, error: Exception) -> None:
        if item.steps_done is None:
            self._on_broken(item.ticket, error)
            return
        request = item.ticket.request
        with bound(**fields_of(request)):
            logger.warning("no preview: %s", without_prompts(str(error), request))
