"""Preemptions under way: slots that pass from a leased request to a waiting one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.records import ReplicaRecord
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.protocol.leases import Lease


class Exchanges:
    """Keeps planned preemptions until the next answer to the replica concerned.

    Attributes:
        again_s: seconds after which a replica is asked again for what it has not released: the
            answer may have been lost. Settings change it.
    """

    def __init__(self, ledger: Ledger, replicas: Replicas) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.again_s = 0.0
        self._pairs_by_replica: dict[str, list[tuple[str, str]]] = {}

    def plan(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Plan to preempt leased requests, each for the waiting one beside it."""
        for victim_id, heir_id in pairs:
            victim = self._ledger.get(victim_id)
            if victim is not None and victim.holder is not None:
                victim.is_preempted = True
                name = victim.holder.replica_id
                self._pairs_by_replica.setdefault(name, []).append((victim_id, heir_id))
                self._replicas.alert(victim.holder)

    def forget(self, replica_id: str) -> None:
        """Drop what concerns a replica that is gone."""
        self._pairs_by_replica.pop(replica_id, None)

    def carry_out(
        self, replica: ReplicaRecord, now_s: float
    ) -> tuple[tuple[Lease, ...], tuple[str, ...]]:
        """Lease to a replica what gets a slot on it; return that, and the ids to release.

        Nothing is preempted for a request that no longer waits, or if a slot is free by now.
        """
        leases, preempted = [], self._overdue(replica, now_s)
        for victim_id, heir_id in self._pairs_by_replica.pop(replica.replica_id, ()):
            victim, heir = self._ledger.get(victim_id), self._ledger.get(heir_id)
            if victim is None or victim.holder is not replica or not victim.is_preempted:
                continue
            is_queued = heir is not None and heir_id in self._ledger.queue
            waits = heir is not None and is_queued and heir.view.model == replica.model
            if not waits or replica.view().room > 0:
                victim.is_preempted = False
            else:
                preempted.append(victim_id)
                victim.asked_s = now_s
                times = victim.view.num_preemptions + 1
                victim.view = replace(victim.view, num_preemptions=times)
                self._ledger.counters.totals["preempted"] += 1
            if waits:
                leases.append(self._ledger.lease(heir_id, replica, now_s))
        return tuple(leases), tuple(preempted)

    def _overdue(self, replica: ReplicaRecord, now_s: float) -> list[str]:
        """Ids that should have been released by now; the replica is asked once more."""
        found = []
        planned = {victim for victim, _ in self._pairs_by_replica.get(replica.replica_id, ())}
        for request_id, record in replica.held.items():
            is_asked = record.is_preempted and request_id not in planned
            if is_asked and now_s >= record.asked_s + self.again_s:
                record.asked_s = now_s
                found.append(request_id)
        return found
