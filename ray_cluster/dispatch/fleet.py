"""The replicas that the dispatch core knows, and those that it remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ray_cluster.dispatch.state import ReplicaRecord
from ray_cluster.leases import Poll
from ray_cluster.policies.types import ReplicaView
from ray_cluster.requests import ModelProfile


class Fleet:
    """The live replicas by id, and what there was to know of each model's last one."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaRecord] = {}
        self._profiles: dict[str, ModelProfile] = {}
        # as it was, for predictions while none lives
        self._remembered: dict[str, ReplicaView] = {}

    def __iter__(self) -> Iterator[ReplicaRecord]:
        return iter(self._replicas.values())

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profile of every model that a replica ever registered, by name."""
        return self._profiles

    def get(self, replica_id: str) -> ReplicaRecord | None:
        """Return a live replica."""
        return self._replicas.get(replica_id)

    def add(self, replica: ReplicaRecord) -> None:
        """Take a replica in."""
        self._replicas[replica.replica_id] = replica
        self._profiles[replica.model] = replica.registration.profile
        self._remembered[replica.model] = replica.view()

    def remove(self, replica_id: str) -> ReplicaRecord | None:
        """Let a replica go; return it if it was here."""
        return self._replicas.pop(replica_id, None)

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

    def peers(self, replica: ReplicaRecord, *, heard_since_s: float) -> list[ReplicaView]:
        """Return the model's other replicas that have room and were heard of since then."""
        return [
            peer.view()
            for peer in self
            if peer is not replica
            and peer.model == replica.model
            and peer.num_free > 0
            and peer.heard_s >= heard_since_s
        ]
