"""A cell and its last hour, as operators see them."""

from __future__ import annotations

from collections import deque
from heapq import nsmallest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.reports.observing import Instant
from ray_cluster.dispatch.reports.snapshots import ClusterSnapshot
from ray_cluster.protocol.cell_view import (
    CellPoint,
    CellView,
    ShownImage,
    ShownReplica,
    ShownWaiting,
    shown_id,
)

POINT_EVERY_S = 10.0
_MOST_POINTS = 360
# images that wait, and LoRAs, of which names are shown
_MOST_SHOWN = 200


def cell_view(
    core: DispatchCore, warnings: tuple[str, ...], history: tuple[CellPoint, ...], now: Instant
) -> CellView:
    """Return a cell as it is now."""
    cluster = core.snapshot(now.now_s)
    first = nsmallest(_MOST_SHOWN, core.waiting_views, key=lambda one: one.deadline_s)
    return CellView(
        at=now.unix_s,
        waiting=cluster.num_waiting_by_model,
        replicas=tuple(
            ShownReplica(
                id=one.replica_id,
                pool=one.registration.pool,
                model=one.model,
                max_batch=one.registration.max_batch,
                images=tuple(
                    ShownImage(shown_id(held.request_id), held.steps_done, held.num_steps)
                    for held in (record.view for record in one.held.values())
                ),
            )
            for one in core.replicas
        ),
        queue=tuple(
            ShownWaiting(shown_id(one.request_id), one.model, one.deadline_s - now.now_s)
            for one in first
        ),
        loras=tuple(one.lora.name for one in core.loras.page("", _MOST_SHOWN)),
        controlnets=core.controls.names,
        warnings=warnings,
        history=history,
    )


class History:
    """Keeps a point every ten seconds."""

    def __init__(self) -> None:
        self._points: deque[CellPoint] = deque(maxlen=_MOST_POINTS)
        self._before: dict[str, int] = {}

    def note(self, cluster: ClusterSnapshot, at_s: float) -> None:
        """Add a point.

        Args:
            at_s: Unix time.
        """
        totals = dict(cluster.totals)

        def new(*events: str) -> int:
            return sum(totals.get(one, 0) - self._before.get(one, 0) for one in events)

        self._points.append(
            CellPoint(
                at=at_s,
                waiting=cluster.num_waiting,
                running=cluster.num_leased,
                done=new("completed"),
                late=new("missed"),
                failed=new("error", "lost"),
                refused=new("refused"),
            )
        )
        self._before = totals

    def after(self, at_s: float) -> tuple[CellPoint, ...]:
        """Return the points later than an instant."""
        return tuple(one for one in self._points if one.at > at_s)
