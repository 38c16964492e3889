"""What the encode stage does: prompts become states, and once more conditioning with late LoRAs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.device.streams import StageStream
from ray_cluster.engine.models.loading import LoadedModel, start_states
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.engine.step.step_call import LateLoras
from ray_cluster.engine.step.step_engine import StepEngine


def is_begun(ticket: Ticket) -> bool:
    """Whether a ticket has been encoded before: then it comes for its conditioning with LoRAs."""
    return ticket.state is not None


def encode_tickets(
    model: LoadedModel, tickets: Sequence[Ticket], stream: StageStream, now_s: float
) -> list[RequestState] | list[Conditioning]:
    """Encode prompts, and wait for them as the next stage reads them in a stream of its own.

    Args:
        tickets: all begun, or none.

    Returns:
        States of those that begin, without LoRAs that start later; of others conditioning.
    """
    requests = [ticket.request for ticket in tickets]
    images = [ticket.image for ticket in tickets]
    sets = [ticket.adapters if _takes_loras(ticket) else None for ticket in tickets]
    stream.adopt([tensor for one in (*images, *sets) if one for tensor in one.tensors()])
    deltas = [None if one is None else one.prompts for one in sets] if any(sets) else []
    found: list[RequestState] | list[Conditioning]
    if is_begun(tickets[0]):
        found = model.encoder.encode(requests, deltas)
    else:
        found = start_states(model, requests, now_s=now_s, images=images, deltas=deltas)
    stream.synchronize()
    return found


def _takes_loras(ticket: Ticket) -> bool:
    return is_begun(ticket) or ticket.request.add_ons.lora_start_step == 0


class LoraArrivals:
    """Brings rows the LoRAs that they begin without; everything runs in the step thread.

    Args:
        engine: that has the rows.
        stepping: the stream of their steps.
        encode: has a ticket's prompts encoded once more, with its LoRAs.
    """

    def __init__(
        self,
        engine: StepEngine,
        live: LiveTickets,
        stepping: StageStream,
        encode: Callable[[Ticket], None],
    ) -> None:
        self._engine = engine
        self._live = live
        self._stepping = stepping
        self._encode = encode

    def enter(self, ticket: Ticket, state: RequestState) -> None:
        """Add a row to the engine, with its LoRAs unless they start later."""
        self._stepping.adopt(state.tensors())
        adapters = ticket.adapters
        if adapters is None:
            self._engine.add(state)
            return
        self._stepping.adopt(adapters.tensors())
        self._engine.add(state, None if state.lacks_loras else adapters.denoiser)
        if state.lacks_loras:
            self._prepare(ticket, adapters)

    def arrive(self, request_id: str, adapters: AdapterSet) -> None:
        """Note the LoRAs of a request that has begun without them, if it is still here."""
        ticket = self._live.get(request_id)
        if ticket is None or ticket.adapters is not None:
            return
        ticket.adapters = adapters
        if ticket.state is not None and self._engine.holds(ticket.state):
            self._stepping.adopt(adapters.tensors())
            self._prepare(ticket, adapters)

    def _prepare(self, ticket: Ticket, adapters: AdapterSet) -> None:
        if adapters.prompts is None:
            self.encoded(ticket, None)
        else:
            self._encode(ticket)

    def encoded(self, ticket: Ticket, conditioning: Conditioning | None) -> None:
        """Give a row its LoRAs, with its prompts by them if they change these."""
        if ticket not in self._live or ticket.state is None or ticket.adapters is None:
            return
        if conditioning is not None:
            self._stepping.adopt(conditioning.tensors().values())
        self._engine.add_loras(ticket.state, LateLoras(ticket.adapters.denoiser, conditioning))
