"""What is done before denoising: images that requests are made from and prompts are encoded."""

from __future__ import annotations

from collections.abc import Sequence

from ray_cluster.engine.device.streams import StageStream
from ray_cluster.engine.edits.template import SentLatents
from ray_cluster.engine.models.loading import LoadedModel, encode_sent, start_states
from ray_cluster.engine.stages.batch_stage import BatchStage
from ray_cluster.engine.stages.tickets import Ticket
from ray_cluster.engine.step.state import Conditioning, RequestState


class EncodeStage(BatchStage[Ticket, RequestState | Conditioning]):
    """Encodes the prompts of tickets."""

    def put_seen(self, ticket: Ticket, latents: SentLatents) -> None:
        """Queue a ticket whose images are encoded; from any thread."""
        ticket.pixels, ticket.latents = None, latents
        self.put(ticket)


def see_tickets(
    model: LoadedModel, tickets: Sequence[Ticket], stream: StageStream
) -> list[SentLatents]:
    """Encode images, and wait for them as the next stage reads them in a stream of its own."""
    found = encode_sent(model, [one.pixels for one in tickets if one.pixels is not None])
    stream.synchronize()
    return found


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
    latents = [ticket.latents for ticket in tickets]
    # encoded before: they come once more, for their conditioning with LoRAs
    are_begun = tickets[0].state is not None
    sets = [
        one.adapters if are_begun or one.request.add_ons.lora_start_step == 0 else None
        for one in tickets
    ]
    stream.adopt([tensor for one in (*latents, *sets) if one for tensor in one.tensors()])
    deltas = [None if one is None else one.prompts for one in sets] if any(sets) else []
    found: list[RequestState] | list[Conditioning]
    if are_begun:
        found = model.encoder.encode(requests, deltas)
    else:
        found = start_states(model, requests, now_s=now_s, latents=latents, deltas=deltas)
    stream.synchronize()
    return found
