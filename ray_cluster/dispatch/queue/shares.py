"""What waits of each client for each model: sums, kept while requests come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ray_cluster.policies.admission.load import NO_LOAD, Load, load_of
from ray_cluster.policies.types import RequestView


class Lane:
    """Loads of requests that wait, by model and client.

    Attributes:
        counts: of the requests by model.
    """

    def __init__(self) -> None:
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

    def loads(self, model: str) -> Mapping[str, Load]:
        """Return what waits for a model, by client."""
        return self._by_model.get(model, {})
