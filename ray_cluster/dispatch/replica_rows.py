"""A model's live replicas as rows of arrays, so that a choice among a thousand is quick."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.placement import Residency
from ray_cluster.policies.routing import NUM_PRICES, ReplicaTable, prices_of
from ray_cluster.policies.types import ReplicaView, StepCost

_FIRST_ROOM = 4


class ReplicaRows:
    """Keeps a row per replica; rows move when one is taken out."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        # by which the rows' prices were worked out; None where there are none yet
        self._costs: list[StepCost | None] = []
        self._row_by_id: dict[str, int] = {}
        self._residents: list[frozenset[str]] = []
        self._holders: dict[str, set[int]] = {}
        self._levels_s: npt.NDArray[np.float64] = np.zeros(_FIRST_ROOM)
        self._rooms: npt.NDArray[np.int64] = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._prices_s: npt.NDArray[np.float64] = np.zeros((_FIRST_ROOM, NUM_PRICES))
        self._heard_s: npt.NDArray[np.float64] = np.zeros(_FIRST_ROOM)

    def add(self, replica_id: str) -> None:
        """Make a row; it has no room until it is put in."""
        row = len(self._ids)
        if row == len(self._rooms):
            self._grow()
        self._ids.append(replica_id)
        self._costs.append(None)
        self._residents.append(frozenset())
        self._row_by_id[replica_id] = row
        self._rooms[row] = 0

    def put(self, view: ReplicaView) -> None:
        """Bring a replica's row up to date; batches are as large as they were priced with."""
        row = self._row_by_id[view.replica_id]
        self._levels_s[row] = view.leased_work_s
        self._rooms[row] = view.room
        if self._costs[row] is not view.step_cost:
            self._costs[row] = view.step_cost
            self._prices_s[row] = prices_of(view)
        self._hold(row, view.residents)

    def _hold(self, row: int, residents: frozenset[str]) -> None:
        """Have something resident on a row, and nothing else."""
        before = self._residents[row]
        if residents is before or residents == before:
            return
        for one in before - residents:
            self._holders[one].remove(row)
            if not self._holders[one]:
                del self._holders[one]
        for one in residents - before:
            self._holders.setdefault(one, set()).add(row)
        self._residents[row] = residents

    def forget_prices(self, replica_id: str) -> None:
        """Have a replica priced anew when its row is next put: its batches have another size."""
        self._costs[self._row_by_id[replica_id]] = None

    def hear(self, replica_id: str, heard_s: float) -> None:
        """Note when a replica was last heard of."""
        self._heard_s[self._row_by_id[replica_id]] = heard_s

    def remove(self, replica_id: str) -> None:
        """Take a row out; the last one takes its place."""
        row, last = self._row_by_id.pop(replica_id), self._ids.pop()
        cost, end = self._costs.pop(), len(self._ids)
        residents = self._residents[end]
        for one in {row, end}:
            self._hold(one, frozenset())
        self._residents.pop()
        if last == replica_id:
            return
        self._hold(row, residents)
        for array in (self._levels_s, self._rooms, self._prices_s, self._heard_s):
            array[row] = array[end]
        self._ids[row], self._costs[row] = last, cost
        self._row_by_id[last] = row

    @property
    def ids(self) -> Sequence[str]:
        """Of the replicas; good until one comes or goes."""
        return self._ids

    @property
    def holders(self) -> Mapping[str, Collection[int]]:
        """Rows by what is resident on them."""
        return self._holders

    @property
    def num_free(self) -> int:
        """Requests that all of them together have room for."""
        return int(self._rooms[: len(self._ids)].sum())

    def row_of(self, replica_id: str) -> int:
        """Return a replica's row, as long as none is taken out."""
        return self._row_by_id[replica_id]

    def id_of(self, row: int) -> str:
        """Return whose row it is."""
        return self._ids[row]

    def table(
        self, heard_after_s: float, residency: Residency | None, *, polls: int | None = None
    ) -> ReplicaTable:
        """Return all rows; those not heard of since then have no room, but the one that polls."""
        count = len(self._ids)
        counts_on = self._heard_s[:count] >= heard_after_s
        if polls is not None:
            counts_on[polls] = True
        rooms = self._rooms[:count] * counts_on
        return ReplicaTable(self._levels_s[:count], rooms, self._prices_s[:count], residency)

    def _grow(self) -> None:
        self._levels_s, self._rooms, self._prices_s, self._heard_s = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self._levels_s, self._rooms, self._prices_s, self._heard_s)
        )
