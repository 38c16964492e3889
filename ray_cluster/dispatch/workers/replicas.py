"""The live replicas of a cell, and which of them could take a request now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from ray_cluster.dispatch.queue.queue import WaitingQueue
from ray_cluster.dispatch.records import ReplicaRecord
from ray_cluster.dispatch.workers.replica_rows import ReplicaRows
from ray_cluster.policies.admission.fluid import PoolView, pool_of
from ray_cluster.policies.admission.load import NO_LOAD, Load
from ray_cluster.policies.costs.cost_model import differs, lesser_cost
from ray_cluster.policies.leasing.placement import NOTHING, Placement, Residency
from ray_cluster.policies.leasing.routing import choose_leases, soonest_first
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Directory, Peer, Poll, Registration
from ray_cluster.requests import ModelProfile, PromptTokenizer

# share by which a replica's cost may have moved since it was pooled with the others'
_POOLED_WITHIN = 0.02


class Replicas:
    """Live replicas by id, with each model's sums, and its profile and last pool.

    Attributes:
        directory: the workers among them that others call.
        gone_s: since when models have no replica.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, ReplicaRecord] = {}
        self._alerted: set[str] = set()
        self._profiles: dict[str, ModelProfile] = {}
        self._base_models: dict[str, str] = {}
        self._tokenizers: dict[str, tuple[PromptTokenizer, ...]] = {}
        # of models without a live replica as it was, for predictions
        self._pools: dict[str, PoolView] = {}
        self._pooled_costs: dict[str, StepCost] = {}
        # each model's pool, and the best that it can be
        self._best_pools: dict[str, tuple[PoolView, PoolView]] = {}
        self._changed: set[str] = set()
        self._counted: dict[str, Load] = {}
        self._in_progress: dict[str, Load] = {}
        self._rows: dict[str, ReplicaRows] = {}
        self.gone_s: dict[str, float] = {}
        self.directory = Directory()

    def __iter__(self) -> Iterator[ReplicaRecord]:
        return iter(self._by_id.values())

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._by_id

    def __getitem__(self, replica_id: str) -> ReplicaRecord:
        return self._by_id[replica_id]

    def get(self, replica_id: str) -> ReplicaRecord | None:
        return self._by_id.get(replica_id)

    def add(self, replica: ReplicaRecord) -> None:
        self._by_id[replica.replica_id] = replica
        self._note_profile(replica)
        self._note_peer(replica)
        replica.changed = self._changed
        self._changed.add(replica.replica_id)
        rows = self._rows.setdefault(replica.model, ReplicaRows())
        rows.add(replica.replica_id)
        rows.hear(replica.replica_id, replica.heard_s)
        self._pools.pop(replica.model, None)
        self.gone_s.pop(replica.model, None)

    def remember(self, replica: ReplicaRecord) -> None:
        """Restore a model of which no replica has registered yet, from an earlier life."""
        if replica.model in self._rows:
            return
        self.gone_s[replica.model] = replica.heard_s
        self._note_profile(replica)
        if replica.model not in self._pools:
            self._pools[replica.model] = _starting(pool_of([replica.view()]), replica)

    def _note_profile(self, replica: ReplicaRecord) -> None:
        registration = replica.registration
        if registration.profile is not None:
            self._profiles[replica.model] = registration.profile
            self._base_models[replica.model] = _base_model(registration)
            # a megabyte: once is enough
            self._tokenizers[replica.model] = registration.prompt_tokenizers
            replica.registration = replace(registration, prompt_tokenizers=())

    def prompt_tokenizers(self, model: str) -> tuple[PromptTokenizer, ...]:
        """Return the tokenizers of the replica of a model that registered last."""
        return self._tokenizers.get(model, ())

    def base_model(self, model: str) -> str:
        """Return what the pool of a model calls its model; empty while nobody says."""
        return self._base_models.get(model, "")

    @property
    def starting(self) -> tuple[str, ...]:
        """Restored models of which no replica has registered yet."""
        return tuple(model for model in self._profiles if model not in self._rows)

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profile of every model that a replica ever registered, by name."""
        return self._profiles

    def hear(self, replica: ReplicaRecord, poll: Poll, now_s: float) -> None:
        """Apply a replica's poll."""
        replica.hear(poll, now_s)
        self.note_heard(replica, now_s)
        if replica.resize(poll.capacity):
            self._rows[replica.model].forget_prices(replica.replica_id)
            self._pools.pop(replica.model, None)
        pooled, cost = self._pooled_costs.get(replica.replica_id), replica.step_cost
        if pooled is not cost and (pooled is None or differs(cost, pooled, by=_POOLED_WITHIN)):
            self._pools.pop(replica.model, None)

    def pop(self, replica_id: str, now_s: float) -> ReplicaRecord | None:
        """Remove and return a replica; the caller sees to what it held."""
        replica = self._by_id.get(replica_id)
        if replica is None:
            return None
        model, last = replica.model, self.pool(replica.model)
        best = self.best_pool(model)
        del self._by_id[replica_id]
        self._note_peer(replica)
        self._rows[model].remove(replica_id)
        self._pooled_costs.pop(replica_id, None)
        self._count(replica, NO_LOAD)
        self._changed.discard(replica_id)
        replica.changed = set()
        self._pools.pop(model, None)
        if last is not None and best is not None and self.pool(model) is None:
            self._pools[model] = _starting(last, replica)
            self._best_pools[model] = self._pools[model], best
        if not self._rows[model].ids:
            self.gone_s[model] = now_s
        return replica

    def news_for(self, replica: ReplicaRecord) -> Directory | None:
        """Return the directory for one who calls others and has another version of it."""
        calls = replica.registration.kind == "denoise"
        is_old = replica.peers_version != self.directory.version
        return self.directory if calls and is_old else None

    def _note_peer(self, replica: ReplicaRecord) -> None:
        """Tell all replicas of a worker that others call, which has come or gone."""
        if replica.registration.endpoint is not None:
            self.directory = directory_of(one.registration for one in self)
            self._alerted |= self._by_id.keys()

    def pool(self, model: str) -> PoolView | None:
        """Return a model's live replicas as one, or the last that there was; None if none ever was.

        It is made anew only when a cost has moved by 2 % or more.
        """
        if model not in self._pools:
            live = [one for one in self if one.model == model]
            if not live:
                return None
            self._pools[model] = pool_of([one.view() for one in live])
            self._pooled_costs |= {one.replica_id: one.step_cost for one in live}
        return self._pools[model]

    def best_pool(self, model: str) -> PoolView | None:
        """See :meth:`ray_cluster.policies.admission.queue_view.QueueView.best_pool`."""
        pool = self.pool(model)
        if pool is None:
            return None
        known, best = self._best_pools.get(model, (None, pool))
        if known is not pool:
            best = self._as_fast_as_the_fastest(model, pool)
            self._best_pools[model] = pool, best
        return best

    def _as_fast_as_the_fastest(self, model: str, pool: PoolView) -> PoolView:
        live = [one for one in self if one.model == model]
        if not live:
            return replace(pool, starts_in_s=0.0)
        cost = reduce(lesser_cost, [one.best_cost for one in live])
        return pool_of([replace(one.view(), step_cost=cost) for one in live])

    def in_progress(self, model: str) -> Load:
        """Return the load of what the model's replicas hold."""
        self._catch_up()
        return self._in_progress.get(model, NO_LOAD)

    def num_free(self, model: str) -> int:
        self._catch_up()
        return self._rows[model].num_free if model in self._rows else 0

    def ids(self, model: str) -> Sequence[str]:
        """Return the ids of a model's live replicas; valid until one comes or goes."""
        rows = self._rows.get(model)
        return () if rows is None else rows.ids

    def note_heard(self, replica: ReplicaRecord, now_s: float) -> None:
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
        """Count a replica's load instead of what it was counted with before."""
        before = self._counted.pop(replica.replica_id, NO_LOAD)
        if load is not NO_LOAD:
            self._counted[replica.replica_id] = load
        if load is not before:
            total = self._in_progress.get(replica.model, NO_LOAD)
            self._in_progress[replica.model] = total.minus(before).plus(load)

    def takers(self, model: str, queue: WaitingQueue, heard_after_s: float) -> Iterator[str]:
        """Ids of replicas with free slots, by when they would end the model's first request."""
        waiting, rows = queue.of_model(model), self._rows.get(model)
        if waiting and rows is not None:
            self._catch_up()
            table = rows.table(heard_after_s, self._residency(model))
            yield from map(rows.id_of, soonest_first(waiting[0], table))

    def alert(self, replica: ReplicaRecord | None) -> None:
        """Note that a replica, if there is one, must be answered at once."""
        if replica is not None:
            self._alerted.add(replica.replica_id)

    def alert_all(self, replica_ids: Iterable[str]) -> None:
        """Likewise for several, if there is something to say to them."""
        self._alerted.update(replica_ids)

    def take_alerted(self) -> set[str]:
        """Return the ids noted by :meth:`alert` since the last call."""
        alerted, self._alerted = self._alerted, set()
        return alerted

    def choose(
        self, replica: ReplicaRecord, queue: WaitingQueue, now_s: float, heard_after_s: float
    ) -> Placement:
        """Return what a replica leases now, counting on peers heard of after that instant."""
        model = replica.model
        if replica.num_free <= 0 or not queue.has(model):
            return NOTHING
        self._catch_up()
        rows = self._rows[model]
        row = rows.row_of(replica.replica_id)
        table = rows.table(heard_after_s, self._residency(model), polls=row)
        return choose_leases(queue.of_model(model), row, table, now_s)

    def _residency(self, model: str) -> Residency | None:
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


def _base_model(registration: Registration) -> str:
    arguments = json.loads(registration.arguments) if registration.arguments else {}
    return str(arguments.get("model", ""))


def _starting(pool: PoolView, last: ReplicaRecord) -> PoolView:
    """Return a pool without a live replica: the next one has to load the model first."""
    return replace(pool, starts_in_s=last.registration.load_s)
