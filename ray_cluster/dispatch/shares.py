"""What waits of each client for each model: sums, kept while requests come and go."""

from __future__ import annotations

from collections import Counter

from ray_cluster.policies.load import NO_LOAD, Load, load_of
from ray_cluster.policies.queue_share import ShareView
from ray_cluster.policies.types import RequestView


class Lane:
    """Loads of requests that wait, by model and client.

    Args:
        is_held_back: whether they wait for their add-ons, before they join the queue of their
            model.

    Attributes:
        counts: of the requests by model.
    """

    def __init__(self, *, is_held_back: bool) -> None:
        self._is_held_back = is_held_back
        self._by_model: dict[str, dict[str, Load]] = {}
        self.counts: Counter[str] = Counter()
        self._entries: dict[str, tuple[str, str, Load]] = {}

    def add(self, view: RequestView, client: str) -> None:
        load = load_of(view)
        self._entries[view.request_id] = view.model, client, load
        clients = self._by_model.setdefault(view.model, {})
        clients[client] = clients.get(client, NO_LOAD).plus(load)
        self.counts[view.model] += 1

    def remove(self, request_id: str) -> None:
        """Count a request no more, with the load that it came with."""
        model, client, load = self._entries.pop(request_id)
        self.counts[model] -= 1
        clients = self._by_model[model]
        clients[client] = clients[client].minus(load)
        if not clients[client].num_requests:
            del clients[client]
        if not clients:
            del self._by_model[model], self.counts[model]

    def client_of(self, request_id: str) -> str:
        """Return whose a request is that waits here."""
        return self._entries[request_id][1]

    def share(self, model: str, client: str) -> ShareView:
        """Return what a client has waiting for a model, and beside how many others."""
        clients = self._by_model.get(model, {})
        own = clients.get(client, NO_LOAD)
        num_clients = len(clients) + (client not in clients)
        return ShareView(own, num_clients, self.counts[model], self._is_held_back)
