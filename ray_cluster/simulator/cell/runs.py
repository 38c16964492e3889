"""Runs the simulations of an experiment on replicas of one device each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.cell.cell import CellResult, CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.cell.experiment import CellExperiment, CellRun, SizeShare
from ray_cluster.simulator.cell.policies import CellPolicy, cell_policy
from ray_cluster.simulator.cell.pools import PricedPool, priced_pools, times
from ray_cluster.simulator.cell.views import CellView, ViewRecorder
from ray_cluster.simulator.cell.workload import (
    MODEL,
    DrawnWorkload,
    ReplayedWorkload,
    example_of,
)
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, Way, reported_share
from ray_cluster.simulator.controlnets.services import ServiceSpec
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.results import Row
from ray_cluster.simulator.workload import Arrival

Watch = Callable[[str, StepRun], None]
_HERE = Path()


@dataclass(frozen=True, slots=True)
class CellRow(Row):
    """What one simulation found.

    Its figures are `attainment` (share of the arrivals that was done in time), `refused`, and
    `broken` (share of the admitted that was late or dropped).

    Attributes:
        met: per arrival, ``1`` if it was done in time, else ``0``.
        admitted: likewise, whether it was admitted.
        view: how it went over time, of the runs that are shown.
    """

    met: str = ""
    admitted: str = ""
    view: CellView | None = None


def run_cell(experiment: CellExperiment, run: CellRun, folder: Path = _HERE) -> CellRow:
    """Simulate one policy, load and seed; the folder is the one of the experiment's file."""
    setting = Setting.of(experiment, folder)
    recorder = None
    if experiment.shows(run):
        most_by_replica = {
            f"{pool.name}-{number}": pool.asked.max_batch
            for pool in setting.pools
            for number in range(pool.asked.replicas)
        }
        recorder = ViewRecorder(setting.workload(run.load, run.seed), most_by_replica)
    result = simulate_cell(setting, run, recorder)
    fates = result.fates
    admitted = [fate for fate in fates if fate.end != "refused"]
    return CellRow(
        policy=run.policy,
        seed=run.seed,
        load=run.load,
        figures={
            "attainment": result.attainment,
            "refused": (len(fates) - len(admitted)) / max(1, len(fates)),
            "broken": sum(not fate.is_met for fate in admitted) / max(1, len(admitted)),
        },
        by_class=result.attainment_by_class(),
        met="".join("01"[fate.is_met] for fate in fates),
        admitted="".join("01"[fate.end != "refused"] for fate in fates),
        view=None if recorder is None else recorder.view(fates),
    )


def simulate_cell(setting: Setting, run: CellRun, watch: Watch | None = None) -> CellResult:
    """Simulate one policy, load and seed; `watch` is called after every run of steps."""
    workload = setting.workload(run.load, run.seed)
    return SimulatedCell(setting.spec(run.policy, run.seed, workload), watch).run(workload)


@dataclass(frozen=True)
class Setting:
    """An experiment's requests and pools, ready to be simulated.

    Attributes:
        source: of the requests.
        pools: with what steps take there in the simulation.
        examples: a request of each size.
    """

    experiment: CellExperiment
    source: DrawnWorkload | ReplayedWorkload
    pools: tuple[PricedPool, ...]
    examples: tuple[RequestView, ...]

    @classmethod
    def of(cls, experiment: CellExperiment, folder: Path = _HERE) -> Setting:
        """Read an experiment's profiles and trace, which lies in the folder.

        Raises:
            ConfigError: a profile or the trace can't be used.
            ValueError: a profile has no steps, or the batching gain leaves nothing of them.
        """
        source: DrawnWorkload | ReplayedWorkload = DrawnWorkload(experiment)
        if experiment.trace is not None:
            source = ReplayedWorkload.of(experiment, folder / experiment.trace)
        examples = source.examples
        return cls(experiment, source, priced_pools(experiment, examples), examples)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the profiles' figures."""
        return tuple(sorted({kind for pool in self.pools for kind in pool.profile.kinds}))

    def alone_s(self, one: RequestView) -> float:
        """Seconds of an image with a device of the first pool for itself, without add-ons."""
        return one.num_steps * step_s(self.pools[0].cost, work_of([one]))

    def is_in_time(self, size: SizeShare) -> bool:
        """Whether an image of a size is in time with a device for itself."""
        drawn = DrawnWorkload(self.experiment)
        alone_s = self.alone_s(example_of(drawn.kind_of(size)))
        return alone_s <= drawn.slo_s(size, self.alone_s)

    def workload(self, load: float, seed: int) -> Sequence[Arrival]:
        """Return the arrivals of a seed."""
        return self.source.arrivals(load, seed, self.alone_s)

    def spec(self, policy: str, seed: int, workload: Sequence[Arrival]) -> CellSpec:
        """Return the cell that runs a policy."""
        policies = [
            cell_policy(
                policy, cost=pool.cost, examples=self.examples, max_batch=pool.asked.max_batch
            )
            for pool in self.pools
        ]
        return CellSpec(
            tuple(
                self._pool(pool, own, workload)
                for pool, own in zip(self.pools, policies, strict=True)
            ),
            seed=seed,
            promises_deadlines=policies[0].promises_deadlines,
            when_late=policies[0].when_late,
            most_steps=policies[0].most_steps,
            one_way_s=self.experiment.one_way_s,
            has_preemption=policies[0].has_preemption,
            services=self._services(policies[0]),
        )

    def _services(self, policy: CellPolicy) -> ServiceSpec | None:
        """Return the devices that run ControlNets alone; such an experiment has one pool."""
        if not policy.num_services:
            return None
        (pool,) = self.pools
        return ServiceSpec(
            policy.num_services, pool.cost, self._add_on_cost(policy), pool.asked.max_batch
        )

    def _add_on_cost(self, policy: CellPolicy) -> AddOnCost:
        experiment = self.experiment
        way = Way(transport_s=experiment.transport_s) if policy.num_services else None
        return AddOnCost(num_kept=experiment.kept_add_ons, way=way)

    def _pool(self, pool: PricedPool, policy: CellPolicy, workload: Sequence[Arrival]) -> PoolSpec:
        """Return a pool; what ControlNets add to a step its replicas report as live ones do."""
        experiment, asked, add_ons = self.experiment, pool.asked, self._add_on_cost(policy)
        share = reported_share(pool.cost, add_ons, self.examples, asked.max_batch)
        has_add_ons = any(one.controlnets or one.loras for one in workload)
        return PoolSpec(
            name=pool.name,
            model=MODEL,
            num_replicas=asked.replicas - policy.num_services,
            hardware=Hardware(
                pool.cost,
                noise_cv=experiment.step_noise,
                load_s=pool.load_s,
                add_ons=add_ons if has_add_ons else None,
            ),
            max_batch=asked.max_batch,
            max_in_flight=policy.max_in_flight or asked.max_batch,
            reported_cost=replace(
                times(pool.cost, experiment.told_times), control_share=share if has_add_ons else 0.0
            ),
            policy=policy.steps,
            mtbf_s=math.inf if experiment.mtbf_s is None else experiment.mtbf_s,
            repair_s=experiment.repair_s,
        )
