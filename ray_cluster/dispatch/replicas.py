"""The live replicas of a cell, and which of them could take a request now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ray_cluster.dispatch.state import ReplicaRecord
from ray_cluster.dispatch.waiting import WaitingQueue
from ray_cluster.leases import Poll
from ray_cluster.policies.routing import choose_leases
from ray_cluster.policies.types import ReplicaView
from ray_cluster.requests import ModelProfile


class Replicas:
    """Live replicas by id, with those that have room at hand: a full cell's others cost nothing.

    Whoever changes a record's room tells of it with :meth:`note_room`. Of every model the profile
    and the last replica are remembered.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, ReplicaRecord] = {}
        self._with_room: dict[str, dict[str, ReplicaRecord]] = {}
        self._alerted: set[str] = set()
        self._profiles: dict[str, ModelProfile] = {}
        # as it was, for predictions while none lives
        self._remembered: dict[str, ReplicaView] = {}

    def __iter__(self) -> Iterator[ReplicaRecord]:
        return iter(self._by_id.values())

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._by_id

    def __getitem__(self, replica_id: str) -> ReplicaRecord:
        return self._by_id[replica_id]

    def get(self, replica_id: str) -> ReplicaRecord | None:
        """Return a live replica."""
        return self._by_id.get(replica_id)

    def add(self, replica: ReplicaRecord) -> None:
        """Take a replica in."""
        self._by_id[replica.replica_id] = replica
        self._profiles[replica.model] = replica.registration.profile
        self._remembered[replica.model] = replica.view()

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profile of every model that a replica ever registered, by name."""
        return self._profiles

    def hear(self, replica: ReplicaRecord, poll: Poll, now_s: float) -> None:
        """Take in what a replica says of itself."""
        replica.hear(poll, now_s)
        self._remembered[replica.model] = replace(replica.view(), num_leased=0, num_free=0)

    def views(self) -> tuple[ReplicaView, ...]:
        """Return all live replicas, and the last one of each model without any."""
        live = [replica.view() for replica in self]
        models = {view.model for view in live}
        gone = [view for model, view in self._remembered.items() if model not in models]
        return (*live, *gone)

    def pop(self, replica_id: str) -> ReplicaRecord | None:
        """Let a replica go, and return it."""
        replica = self._by_id.pop(replica_id, None)
        if replica is not None:
            self._with_room.get(replica.model, {}).pop(replica_id, None)
        return replica

    def note_room(self, replica: ReplicaRecord) -> None:
        """Take notice of how much room a replica has now."""
        roomy = self._with_room.setdefault(replica.model, {})
        if replica.num_free <= 0:
            roomy.pop(replica.replica_id, None)
        elif replica.replica_id not in roomy:
            roomy[replica.replica_id] = replica

    def with_room(self, model: str) -> Collection[ReplicaRecord]:
        """Return the model's replicas that have room, those first that have had it for longest."""
        return self._with_room.get(model, {}).values()

    def alert(self, replica: ReplicaRecord | None) -> None:
        """Note that a replica, if there is one, has an abort to hear of."""
        if replica is not None:
            self._alerted.add(replica.replica_id)

    def take_alerted(self) -> set[str]:
        """Return the ids of those with an abort to hear of since the last such call."""
        alerted, self._alerted = self._alerted, set()
        return alerted

    def choose(
        self, replica: ReplicaRecord, queue: WaitingQueue, heard_after_s: float
    ) -> tuple[str, ...]:
        """Return what a replica leases now, beside peers that were heard of after that instant."""
        if replica.num_free <= 0 or not queue.has(replica.model):
            return ()
        # those without room are left out to save time
        peers = [
            peer.view()
            for peer in self.with_room(replica.model)
            if peer is not replica and peer.heard_s >= heard_after_s
        ]
        # no more of the queue than all of them could take: the rest decides nothing
        num_places = replica.num_free + sum(peer.room for peer in peers)
        return choose_leases(queue.first(replica.model, num_places), replica.view(), peers)
