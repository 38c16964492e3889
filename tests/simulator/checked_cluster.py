"""Clusters that are looked at while they run: whatever breaks a law of the system fails."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ray_cluster.protocol.leases import Fence
from ray_cluster.simulator.control.cluster import SimulatedCluster
from ray_cluster.simulator.replica import StepRun
from tests.simulator.clusters import FLEET

MODELS = {pool.name: pool.model for pool in FLEET.pools}


@dataclass
class ClusterOverseer:
    """Notes every batch, and holds it against those before and against the dispatcher's books."""

    cluster: SimulatedCluster | None = None
    runs: list[tuple[str, StepRun]] = field(default_factory=list)
    most_by_pool: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    _free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _makers: dict[Fence, str] = field(default_factory=dict)

    def __call__(self, replica_id: str, run: StepRun) -> None:
        assert self.cluster is not None
        pool = replica_id.rpartition("-")[0]
        # no replica does two things at once
        assert run.start_s >= self._free_s[replica_id]
        self._free_s[replica_id] = run.ends_s[-1]
        assert 0 < len(set(run.request_ids)) == len(run.request_ids) <= self.most_by_pool[pool]
        held = self.cluster.cell.core.replicas[replica_id].held
        for request_id in run.request_ids:
            # what was given up or answered meanwhile is held no more
            if (record := held.get(request_id)) is None:
                continue
            # nothing is made without a lease, and no lease is made use of twice
            assert record.fence is not None
            assert record.view.model == MODELS[pool]
            assert self._makers.setdefault(record.fence, replica_id) == replica_id
            assert record.leased_s <= run.start_s
        self.runs.append((replica_id, run))

    def check(self, num_offered: int) -> None:
        """Assert what holds of a cluster at every instant."""
        assert self.cluster is not None
        core, fates = self.cluster.cell.core, self.cluster.fates
        fences = []
        for replica in core.replicas:
            pool = replica.replica_id.rpartition("-")[0]
            # a batch that is under way may be larger than the cap of the next
            assert len(replica.held) <= self.most_by_pool[pool] or pool not in MODELS
            for record in replica.held.values():
                assert record.holder is replica
                assert record.fence is not None
                fences.append(record.fence)
        assert len(set(fences)) == len(fences)
        totals = Counter(core.snapshot(0.0).totals)
        ended = totals["completed"] + totals["aborted"] + totals["lost"] + totals["error"]
        assert totals["accepted"] == ended + core.num_waiting + len(fences)
        assert num_offered == len(fates) + self.cluster.cell.num_open
        state = self.cluster.observe()
        seen = sum(one.num_waiting + one.num_in_batches for one in state.models)
        # some are at a scorer
        assert seen <= self.cluster.cell.num_open
        assert sum(one.num_missed for one in state.services) == sum(not one.is_met for one in fates)
