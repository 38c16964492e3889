"""Requests that wait for models which nobody serves any more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ray_cluster.dispatch.queue.admission import Admission
from ray_cluster.dispatch.queue.admission_view import AdmissionView
from ray_cluster.dispatch.queue.due import AT_ONCE
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.protocol.leases import lane_words


class Unserved:
    """Ends what waits for a removed model without a live replica, and calls for a lost one.

    Args:
        admission: knows which models were removed.

    Attributes:
        lost_s: seconds without a replica after which a model counts as lost; settings change it.
        is_behind: whether there is more to end.
    """

    def __init__(
        self, ledger: Ledger, replicas: Replicas, queue: AdmissionView, admission: Admission
    ) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._queue = queue
        self._admission = admission
        self.lost_s = 0.0
        self.is_behind = False

    def note_lost(self, now_s: float) -> None:
        """Know which models are lost by now."""
        self._queue.note_lost(self.lost_s, now_s)

    @property
    def next_lost_s(self) -> float:
        """Instant at which the next model is lost that something waits for."""
        return self._queue.next_lost_s(self.lost_s)

    def end(self, now_s: float) -> None:
        """End some of those that nobody serves."""
        self.note_lost(now_s)
        found = list(islice(self._found(), AT_ONCE))
        self.is_behind = len(found) == AT_ONCE
        for record, message in found:
            self._ledger.fail(record, "lost", message, now_s)

    def _found(self) -> Iterator[tuple[RequestRecord, str]]:
        for model in self._admission.removed:
            if not self._replicas.ids(model):
                for record in self._waiting(model):
                    yield record, f"{lane_words(model)} was removed"
        for model in self._queue.lost:
            message = f"no replica of {lane_words(model)} has lived for {self.lost_s:g} s"
            for record in self._waiting(model):
                # jobs wait on
                if record.client_s is not None:
                    yield record, message

    def _waiting(self, model: str) -> Iterator[RequestRecord]:
        for view in self._ledger.queue.of_model(model):
            if (record := self._ledger.get(view.request_id)) is not None:
                yield record
