"""The live replicas of a cell, and which of them could take a request now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ray_cluster.dispatch.replica_rows import ReplicaRows
from ray_cluster.dispatch.state import ReplicaRecord
from ray_cluster.dispatch.waiting import WaitingQueue
from ray_cluster.policies.cost_model import differs
from ray_cluster.policies.load import NO_LOAD, Load
from ray_cluster.policies.placement import NOTHING, Placement, Residency
from ray_cluster.policies.pool import PoolView, pool_of
from ray_cluster.policies.routing import choose_leases, soonest_first
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Directory, Peer, Poll, Registration
from ray_cluster.requests import ModelProfile

# share by which a replica's cost may have moved since it was pooled with the others'
_POOLED_WITHIN = 0.02


class Replicas:
    """Live replicas by id, with sums over each model's that are kept as they change.

    Of every model the profile and the last replica are remembered.

    Attributes:
        directory: the workers among them that others call.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, ReplicaRecord] = {}
        self._alerted: set[str] = set()
        self._profiles: dict[str, ModelProfile] = {}
        # of models without a live replica as it was, for predictions
        self._pools: dict[str, PoolView] = {}
        self._pooled_costs: dict[str, StepCost] = {}
        self._changed: set[str] = set()
        self._counted: dict[str, Load] = {}
        self._in_progress: dict[str, Load] = {}
        self._rows: dict[str, ReplicaRows] = {}
        self.directory = Directory()

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
        if replica.registration.profile is not None:
            self._profiles[replica.model] = replica.registration.profile
        self._note_peer(replica)
        replica.changed = self._changed
        self._changed.add(replica.replica_id)
        rows = self._rows.setdefault(replica.model, ReplicaRows())
        rows.add(replica.replica_id)
        rows.hear(replica.replica_id, replica.heard_s)
        self._pools.pop(replica.model, None)

    def remember(self, replica: ReplicaRecord) -> None:
        """Know a model of which no replica has come yet, by one of an earlier life."""
        profile = replica.registration.profile
        if profile is not None and replica.model not in self._profiles:
            self._profiles[replica.model] = profile
            self._pools[replica.model] = _starting(pool_of([replica.view()]), replica)

    @property
    def starting(self) -> tuple[str, ...]:
        """Models that are remembered, and of which no replica has come yet."""
        return tuple(model for model in self._profiles if model not in self._rows)

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profile of every model that a replica ever registered, by name."""
        return self._profiles

    def hear(self, replica: ReplicaRecord, poll: Poll, now_s: float) -> None:
        """Take in what a replica says of itself."""
        replica.hear(poll, now_s)
        self.note_heard(replica, now_s)
        if replica.resize(poll.capacity):
            self._rows[replica.model].forget_prices(replica.replica_id)
            self._pools.pop(replica.model, None)
        pooled, cost = self._pooled_costs.get(replica.replica_id), replica.step_cost
        if pooled is not cost and (pooled is None or differs(cost, pooled, by=_POOLED_WITHIN)):
            self._pools.pop(replica.model, None)

    def pop(self, replica_id: str) -> ReplicaRecord | None:
        """Let a replica go, and return it; who let it go sees to what it held."""
        replica = self._by_id.get(replica_id)
        if replica is None:
            return None
        model, last = replica.model, self.pool(replica.model)
        del self._by_id[replica_id]
        self._note_peer(replica)
        self._rows[model].remove(replica_id)
        self._pooled_costs.pop(replica_id, None)
        self._count(replica, NO_LOAD)
        self._changed.discard(replica_id)
        replica.changed = set()
        self._pools.pop(model, None)
        if last is not None and self.pool(model) is None:
            self._pools[model] = _starting(last, replica)
        return replica

    def _note_peer(self, replica: ReplicaRecord) -> None:
        """Have everybody hear of a worker that others call, which has come or gone."""
        if replica.registration.endpoint is not None:
            self.directory = directory_of(one.registration for one in self)
            self._alerted |= self._by_id.keys()

    def pool(self, model: str) -> PoolView | None:
        """Return a model's live replicas as one, or the last that there was; None if none ever was.

        Costs that have moved by less than 2 % since it was made do not count.
        """
        if model not in self._pools:
            live = [one for one in self if one.model == model]
            if not live:
                return None
            self._pools[model] = pool_of([one.view() for one in live])
            self._pooled_costs |= {one.replica_id: one.step_cost for one in live}
        return self._pools[model]

    def in_progress(self, model: str) -> Load:
        """Return what the model's replicas hold."""
        self._catch_up()
        return self._in_progress.get(model, NO_LOAD)

    def num_free(self, model: str) -> int:
        """Return for how many requests the model's replicas have room."""
        self._catch_up()
        return self._rows[model].num_free if model in self._rows else 0

    def ids(self, model: str) -> Sequence[str]:
        """Return the ids of a model's live replicas; good until one comes or goes."""
        rows = self._rows.get(model)
        return () if rows is None else rows.ids

    def note_heard(self, replica: ReplicaRecord, now_s: float) -> None:
        """Note a sign of life."""
        replica.heard_s = now_s
        self._rows[replica.model].hear(replica.replica_id, now_s)

    def _catch_up(self) -> None:
        """Bring the sums and rows of what has changed up to date."""
        for replica_id in self._changed:
            replica = self._by_id[replica_id]
            self._count(replica, replica.load())
            self._rows[replica.model].put(replica.view())
        self._changed.clear()

    def _count(self, replica: ReplicaRecord, load: Load) -> None:
        """Have a replica's load stand for what it was counted for so far."""
        before = self._counted.pop(replica.replica_id, NO_LOAD)
        if load is not NO_LOAD:
            self._counted[replica.replica_id] = load
        if load is not before:
            total = self._in_progress.get(replica.model, NO_LOAD)
            self._in_progress[replica.model] = total - before + load

    def takers(self, model: str, queue: WaitingQueue, heard_after_s: float) -> Iterator[str]:
        """Ids of those with room, by when they would end what waits first of their model."""
        line, rows = queue.line(model), self._rows.get(model)
        if line and rows is not None:
            self._catch_up()
            table = rows.table(heard_after_s, self._residency(model))
            yield from map(rows.id_of, soonest_first(line[0], table))

    def alert(self, replica: ReplicaRecord | None) -> None:
        """Note that a replica, if there is one, has an abort to hear of."""
        if replica is not None:
            self._alerted.add(replica.replica_id)

    def take_alerted(self) -> set[str]:
        """Return the ids of those with an abort to hear of since the last such call."""
        alerted, self._alerted = self._alerted, set()
        return alerted

    def choose(
        self, replica: ReplicaRecord, queue: WaitingQueue, now_s: float, heard_after_s: float
    ) -> Placement:
        """Return what a replica leases now, beside peers that were heard of after that instant."""
        model = replica.model
        if replica.num_free <= 0 or not queue.has(model):
            return NOTHING
        self._catch_up()
        rows = self._rows[model]
        row = rows.row_of(replica.replica_id)
        table = rows.table(heard_after_s, self._residency(model), polls=row)
        return choose_leases(queue.line(model), row, table, now_s)

    def _residency(self, model: str) -> Residency | None:
        """What is resident on a model's replicas; None if nothing is."""
        holders = self._rows[model].holders
        pool = self.pool(model) if holders else None
        return None if pool is None else Residency(pool.slowest_cost, pool.max_batch, holders)


def directory_of(registrations: Iterable[Registration]) -> Directory:
    """Return the workers that others call, under a version that tells them from all others."""
    peers = tuple(
        Peer(one.kind, one.model, one.replica_id, one.node, one.endpoint)
        for one in sorted(registrations, key=lambda one: one.replica_id)
        if one.endpoint is not None
    )
    if not peers:
        return Directory()
    # an endpoint's secret is new in every life of its worker, and no part of its repr
    said = repr([(one, one.endpoint.secret) for one in peers])
    return Directory(hashlib.sha256(said.encode()).hexdigest()[:16], peers)


def _starting(pool: PoolView, last: ReplicaRecord) -> PoolView:
    """Return a pool without a live replica: the next one has to load the model first."""
    return replace(pool, starts_in_s=last.registration.load_s)
