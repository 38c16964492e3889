"""Attached requests: they end when their client is gone, or the service stops."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ray_cluster.dispatch.queue.due import Due
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.policies.admission.queue_view import ClientView
from ray_cluster.requests import ImageRequest


class Attached:
    """Watches the clients of a ledger's requests; jobs' have none.

    Attributes:
        timeout_s: seconds of silence after which a client counts as gone; settings change it.
    """

    def __init__(self, ledger: Ledger, replicas: Replicas, timeout_s: float) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.timeout_s = timeout_s
        self._gone = Due(self._gone_s, ledger.get)

    def watch(self, requests: Iterable[ImageRequest]) -> None:
        """Watch the client of requests that were accepted."""
        for request in requests:
            if (record := self._ledger.get(request.request_id)) is not None:
                self._gone.add(record, len(self._ledger))

    def view_of(self, client: str | None, most: int) -> ClientView | None:
        """Return what a client has in flight and may have; None for jobs, which have none."""
        if client is None:
            return None
        return ClientView([record.view for record in self._ledger.attached_of(client)], most)

    def touch(self, request_ids: Iterable[str], now_s: float) -> None:
        """Note that the client of these requests is still there."""
        for request_id in request_ids:
            record = self._ledger.get(request_id)
            if record is not None and record.client_s is not None:
                record.client_s = now_s

    def touch_all(self, now_s: float) -> None:
        """Count the silence of all clients from now on."""
        for record in self._ledger:
            if record.client_s is not None:
                record.client_s = now_s
        self._gone.restart([one.view.request_id for one in self._ledger])

    def abort(self, record: RequestRecord, message: str = "aborted by its client") -> None:
        """End a request; the next answer to its replica's poll says so."""
        self._replicas.alert(record.holder)
        self._ledger.fail(record, "aborted", message)

    def expire(self, now_s: float) -> None:
        """End requests whose clients are gone, some of them at once."""
        for record in self._gone.take(now_s):
            self.abort(record, "its client was not heard of any more")

    @property
    def next_gone_s(self) -> float:
        """Instant before which no client counts as gone; infinite without any."""
        return self._gone.next_s

    def end(self) -> None:
        """End all attached requests: this dispatcher stops."""
        for record in list(self._ledger):
            if record.client_s is not None:
                self._replicas.alert(record.holder)
                self._ledger.fail(record, "lost", "the service is being stopped")

    def _gone_s(self, record: RequestRecord) -> float:
        return math.inf if record.client_s is None else record.client_s + self.timeout_s
