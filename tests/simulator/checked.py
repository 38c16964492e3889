"""Simulations that are looked at while they run: whatever breaks a law of the system fails."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ray_cluster.simulator.cell.cell import CellResult, CellSpec, SimulatedCell
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.workload import Arrival


@dataclass
class Overseer:
    """Notes every run of steps, and holds it against those before."""

    runs: list[tuple[str, StepRun]] = field(default_factory=list)
    steps_by_id: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _stepped_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __call__(self, replica_id: str, run: StepRun) -> None:
        ends_s = [run.start_s, *run.ends_s]
        assert ends_s == sorted(ends_s)
        # no device does two things at once
        assert run.start_s >= self._free_s[replica_id]
        self._free_s[replica_id] = run.ends_s[-1]
        assert len(set(run.request_ids)) == len(run.request_ids) > 0
        for request_id in run.request_ids:
            # no step before the one before it has ended, wherever that was
            assert run.start_s >= self._stepped_s[request_id]
            self._stepped_s[request_id] = run.ends_s[-1]
            self.steps_by_id[request_id] += len(run.ends_s)
        self.runs.append((replica_id, run))


def simulate(spec: CellSpec, workload: Sequence[Arrival]) -> tuple[CellResult, Overseer]:
    """Run a workload; what holds of every simulation is asserted."""
    overseer = Overseer()
    cell = SimulatedCell(spec, overseer)
    result = cell.run(workload)
    never_fail = all(pool.mtbf_s == float("inf") for pool in spec.pools)
    assert len(result.fates) == len(workload)
    totals = Counter(cell.core.snapshot(result.end_s).totals)
    # nothing is left, and everything accepted came to exactly one end
    assert len(list(cell.core.queue.waiting_models)) == 0
    assert totals["accepted"] == result.totals["finished"] + result.totals["failed"]
    assert totals["refused"] == result.totals["refused"]
    for number, fate in enumerate(result.fates):
        assert fate.arrival is workload[number]
        assert fate.end_s >= fate.arrival.arrival_s
        steps = overseer.steps_by_id[f"{number}"]
        if fate.end == "refused":
            assert steps == 0
        if fate.end == "finished":
            wanted = fate.num_steps
            assert (fate.arrival.fewest_steps or fate.arrival.num_steps) <= wanted
            assert steps == wanted if never_fail else steps >= wanted
    for name, busy_s in result.busy_s_by_replica.items():
        runs_s = sum(run.ends_s[-1] - run.start_s for who, run in overseer.runs if who == name)
        assert busy_s >= runs_s - 1e-9
        assert busy_s <= result.end_s + 1e-9
    return result, overseer
