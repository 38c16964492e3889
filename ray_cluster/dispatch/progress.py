"""How far an accepted request is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_cluster.dispatch.state import RequestRecord
from ray_cluster.leases import Preview
from ray_cluster.policies.admission import QueueView, predict_s

if TYPE_CHECKING:
    # it needs numpy, which commands that show jobs do without
    from ray_cluster.dispatch.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is.

    Attributes:
        position: requests of its model that wait before it; None once it is leased.
        steps_done: denoising steps, of ``num_steps``.
        predicted_s: seconds until it is done, by the admission policy; None without replicas, or if
            nobody asked.
        preview: the last one.
    """

    position: int | None
    steps_done: int
    num_steps: int
    attempts: int
    predicted_s: float | None
    preview: Preview | None = None

    @classmethod
    def of(cls, record: RequestRecord, waiting: WaitingQueue, queue: QueueView | None) -> Progress:
        """Return the progress of a request.

        Args:
            queue: as it is, to predict from; None predicts nothing.
        """
        view, predicted_s = record.view, None
        if queue is not None and queue.pool(view.model) is not None:
            predicted_s = predict_s([view], queue)
        return cls(
            position=waiting.position(view) if record.holder is None else None,
            steps_done=view.steps_done,
            num_steps=view.num_steps,
            attempts=record.num_leases,
            predicted_s=predicted_s,
            preview=record.preview,
        )
