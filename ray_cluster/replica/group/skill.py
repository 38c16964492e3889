"""What a group's head does beside any model's replica: it reports what its degrees cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray_cluster.engine.groups.group_engine import GroupEngine
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.leases import Poll
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica.denoise.skill import DenoiseSkill
from ray_cluster.replica.group.metrics import GroupMetrics
from ray_cluster.replica.group.ranks import GroupRanks


class GroupSkill(DenoiseSkill):
    """Keeps the ranks of a group busy with leases.

    Args:
        ranks: that step, encode and decode.
        engine: of the same ranks.
        others: see :class:`DenoiseSkill`.
    """

    def __init__(
        self, *positional: Any, ranks: GroupRanks, engine: GroupEngine, **others: Any
    ) -> None:
        super().__init__(*positional, **others)
        self._ranks, self._engine = ranks, engine
        self._group_metrics = GroupMetrics(self.registration.model)

    def poll(self, poll: Poll) -> Poll:
        """Return a poll with what steps cost at present, and which ranks take one for whom."""
        engine = self._engine
        return replace(super().poll(poll), group=engine.costs.current, seats=engine.seats)

    def apply(self, settings: WorkerSettings) -> None:
        """Apply other settings; a group steps one image on each set."""
        self.capacity = Capacity(settings.max_in_flight, 1)

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        ranks = self._ranks
        own = self._group_metrics.snapshot(
            self._engine.tally, ranks.num_recoveries, ranks.recovery_s
        )
        return (*super().metrics(), *own)

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread has died or hangs, or the ranks do not start again."""
        self._ranks.check_alive()
        super().check_alive()

    async def close(self) -> None:
        """End the threads and the ranks."""
        await super().close()
        self._ranks.close()
