"""Requests on their way through the stages of a runner."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.edits.template import SentLatents
from ray_cluster.engine.step.state import RequestState
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.requests import ImageRequest


@dataclass(slots=True, eq=False)
class Ticket:
    """One submission; every stage drops it once it is no longer live.

    Attributes:
        arrival_s: instant at which the service got the request, on the runner's clock.
        deadline_s: instant on the same clock.
        queued_s: seconds the request waited before it was submitted here.
        entered_s: instant at which it entered its present stage.
        pixels: that it is made from, if any; None once they are encoded.
        latents: what these are encoded as; None once they are part of the state.
        adapters: None without any.
        maps: of its ControlNets; see :class:`RequestState`.
        state: None until it is encoded.
    """

    request: ImageRequest
    arrival_s: float
    deadline_s: float
    queued_s: float
    entered_s: float
    pixels: SentPixels | None = None
    latents: SentLatents | None = None
    adapters: AdapterSet | None = None
    maps: tuple[Tensor, ...] = ()
    state: RequestState | None = None


class LiveTickets:
    """The tickets in flight, by request id; safe to use from any thread.

    An abort takes the ticket out here, and a later submission under the same id is another
    ticket: stages compare identities, never ids.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        with self._lock:
            return self._tickets.get(ticket.request.request_id) is ticket

    def enter(self, ticket: Ticket) -> None:
        """Add a ticket; ValueError if its request id is in flight already."""
        request_id = ticket.request.request_id
        with self._lock:
            if request_id in self._tickets:
                raise ValueError(f"request {request_id!r} is in flight already")
            self._tickets[request_id] = ticket

    def leave(self, ticket: Ticket) -> bool:
        """Take a ticket out for good; False when it was taken out before."""
        request_id = ticket.request.request_id
        with self._lock:
            if self._tickets.get(request_id) is not ticket:
                return False
            del self._tickets[request_id]
            return True

    def get(self, request_id: str) -> Ticket | None:
        """Return the live ticket of that id."""
        with self._lock:
            return self._tickets.get(request_id)

    def take(self, request_id: str) -> Ticket | None:
        """Take the ticket of that id out, if there is one."""
        with self._lock:
            return self._tickets.pop(request_id, None)

    def take_all(self) -> list[Ticket]:
        """Take all tickets out."""
        with self._lock:
            tickets = list(self._tickets.values())
            self._tickets.clear()
        return tickets

    def of_state(self, state: RequestState) -> Ticket | None:
        """Return the live ticket that carries this very state."""
        with self._lock:
            ticket = self._tickets.get(state.request.request_id)
        return ticket if ticket is not None and ticket.state is state else None

    def steps_done_by_id(self) -> dict[str, int]:
        """Return the denoising steps done by every live ticket."""
        with self._lock:
            tickets = dict(self._tickets)
        return {
            request_id: ticket.state.step_index if ticket.state else 0
            for request_id, ticket in tickets.items()
        }
