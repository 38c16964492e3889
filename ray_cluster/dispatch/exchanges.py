"""Places that are to change hands: from a leased request to one that waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ray_cluster.dispatch.ledger import Ledger
from ray_cluster.dispatch.replicas import Replicas
from ray_cluster.dispatch.state import ReplicaRecord
from ray_cluster.leases import Lease


class Exchanges:
    """Keeps who is to give way to whom until the replica that it concerns is answered."""

    def __init__(self, ledger: Ledger, replicas: Replicas) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._pairs_by_replica: dict[str, list[tuple[str, str]]] = {}

    def plan(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Note that leased requests give their places, each to the one beside it, which waits."""
        for victim_id, heir_id in pairs:
            victim = self._ledger.get(victim_id)
            if victim is not None and victim.holder is not None:
                victim.gives_way = True
                name = victim.holder.replica_id
                self._pairs_by_replica.setdefault(name, []).append((victim_id, heir_id))
                self._replicas.alert(victim.holder)

    def forget(self, replica_id: str) -> None:
        """Drop what concerns a replica that is gone."""
        self._pairs_by_replica.pop(replica_id, None)

    def carry_out(
        self, replica: ReplicaRecord, now_s: float
    ) -> tuple[tuple[Lease, ...], tuple[str, ...]]:
        """Lease to a replica what gets a place on it; return that, and who is to hand it back.

        Nobody gives way for somebody who does not wait any more, and nobody who has ended can.
        """
        leases, preempted = [], []
        for victim_id, heir_id in self._pairs_by_replica.pop(replica.replica_id, ()):
            victim = self._ledger.get(victim_id)
            if victim is None or victim.holder is not replica or not victim.gives_way:
                continue
            if heir_id not in self._ledger.queue:
                victim.gives_way = False
                continue
            victim.view = replace(victim.view, num_preemptions=victim.view.num_preemptions + 1)
            preempted.append(victim_id)
            leases.append(self._ledger.lease(heir_id, replica, now_s))
            self._ledger.totals["preempted"] += 1
        return tuple(leases), tuple(preempted)
