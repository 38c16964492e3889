"""One model's replicas as rows of arrays, for choices among many of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.admission.load import NUM_AMOUNTS
from ray_cluster.policies.leasing.placement import Residency
from ray_cluster.policies.leasing.routing import ReplicaTable, shared_prices
from ray_cluster.policies.types import ReplicaView, StepCost

_FIRST_CAPACITY = 4


class ReplicaRows:
    """One model's replicas as rows of arrays, so that a choice among a thousand is quick.

    Rows move when one is removed.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        # that the rows' prices are for; None where there are none yet
        self._costs: list[StepCost | None] = []
        self._row_by_id: dict[str, int] = {}
        self._residents: list[frozenset[str]] = []
        self._holders: dict[str, set[int]] = {}
        # sets of LoRAs by the ids of replicas that are merged with them
        self._merged: dict[str, str] = {}
        self._levels_s: npt.NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        self._rooms: npt.NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._prices_s: npt.NDArray[np.float64] = np.zeros((_FIRST_CAPACITY, NUM_AMOUNTS))
        self._heard_s: npt.NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)

    def add(self, replica_id: str) -> None:
        """Add a row without free slots until it is put."""
        row = len(self._ids)
        if row == len(self._rooms):
            self._grow()
        self._ids.append(replica_id)
        self._costs.append(None)
        self._residents.append(frozenset())
        self._row_by_id[replica_id] = row
        self._rooms[row] = 0

    def put(self, view: ReplicaView) -> None:
        """Update a replica's row; its prices only for another cost."""
        row = self._row_by_id[view.replica_id]
        self._levels_s[row] = view.leased_work_s
        self._rooms[row] = view.room
        if self._costs[row] is not view.step_cost:
            self._costs[row] = view.step_cost
            self._prices_s[row] = shared_prices(view)
        self._hold(row, view.residents)
        self._merged.pop(view.replica_id, None)
        if view.merged:
            self._merged[view.replica_id] = view.merged

    def _hold(self, row: int, residents: frozenset[str]) -> None:
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
        """Price a replica anew when its row is next put: its batches have another size."""
        self._costs[self._row_by_id[replica_id]] = None

    def hear(self, replica_id: str, heard_s: float) -> None:
        self._heard_s[self._row_by_id[replica_id]] = heard_s

    def remove(self, replica_id: str) -> None:
        """Remove a row; the last one takes its place."""
        self._merged.pop(replica_id, None)
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
        return self._ids

    @property
    def holders(self) -> Mapping[str, Collection[int]]:
        return self._holders

    @property
    def num_free(self) -> int:
        return int(self._rooms[: len(self._ids)].sum())

    def row_of(self, replica_id: str) -> int:
        return self._row_by_id[replica_id]

    def id_of(self, row: int) -> str:
        return self._ids[row]

    def table(
        self, heard_after_s: float, residency: Residency | None, *, polls: int | None = None
    ) -> ReplicaTable:
        """Return all rows; replicas not heard of since then have no slots, unless they poll now."""
        count = len(self._ids)
        counts_on = self._heard_s[:count] >= heard_after_s
        if polls is not None:
            counts_on[polls] = True
        rooms = self._rooms[:count] * counts_on
        merged = tuple(self._merged.get(one, "") for one in self._ids) if self._merged else ()
        return ReplicaTable(
            self._levels_s[:count], rooms, self._prices_s[:count], residency, merged
        )

    def _grow(self) -> None:
        self._levels_s, self._rooms, self._prices_s, self._heard_s = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self._levels_s, self._rooms, self._prices_s, self._heard_s)
        )
