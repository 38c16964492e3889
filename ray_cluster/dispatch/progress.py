"""How far an accepted request is."""

from __future__ import annotations

from dataclasses import dataclass

from ray_cluster.leases import Preview


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
