"""Places that are to change hands: from a leased request to one that waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ray_cluster.dispatch.ledger import Ledger
from ray_cluster.dispatch.replicas import Replicas
from ray_cluster.dispatch.state import ReplicaRecord
from ray_cluster.protocol.leases import Lease


class Exchanges:
    """Keeps who is to give way to whom until the replica that it concerns is answered.

    Attributes:
        again_s: seconds after which a replica is asked again for what it has not handed back: the
            answer may have been lost. Settings change it.
    """

    def __init__(self, ledger: Ledger, replicas: Replicas) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.again_s = 0.0
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

        Nobody gives way for somebody who does not wait any more, nor where there is room by now.
        """
        leases, preempted = [], self._overdue(replica, now_s)
        for victim_id, heir_id in self._pairs_by_replica.pop(replica.replica_id, ()):
            victim, heir = self._ledger.get(victim_id), self._ledger.get(heir_id)
            if victim is None or victim.holder is not replica or not victim.gives_way:
                continue
            waits = heir is not None and heir.holder is None and heir.view.model == replica.model
            if not waits or replica.view().room > 0:
                victim.gives_way = False
            else:
                preempted.append(victim_id)
                victim.asked_s = now_s
                times = victim.view.num_preemptions + 1
                victim.view = replace(victim.view, num_preemptions=times)
                self._ledger.totals["preempted"] += 1
            if waits:
                leases.append(self._ledger.lease(heir_id, replica, now_s))
        return tuple(leases), tuple(preempted)

    def _overdue(self, replica: ReplicaRecord, now_s: float) -> list[str]:
        """Who should have been handed back by now; they are asked for once more."""
        found = []
        planned = {victim for victim, _ in self._pairs_by_replica.get(replica.replica_id, ())}
        for request_id, record in replica.held.items():
            is_asked = record.gives_way and request_id not in planned
            if is_asked and now_s >= record.asked_s + self.again_s:
                record.asked_s = now_s
                found.append(request_id)
        return found
