"""Runs the simulations of an experiment on replicas of one device each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.policies.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.add_ons import AddOnCost, mean_step_factor
from ray_cluster.simulator.cell import CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.cell_experiment import CellExperiment, CellRun, SizeShare
from ray_cluster.simulator.cell_policies import CellPolicy, cell_policy
from ray_cluster.simulator.cell_pools import PricedPool, priced_pools, times
from ray_cluster.simulator.cell_workload import (
    MODEL,
    CellWorkload,
    DrawnWorkload,
    example_of,
    workload_of,
)
from ray_cluster.simulator.fates import CellResult
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.workload import Arrival

Watch = Callable[[str, StepRun], None]
_HERE = Path()


@dataclass(frozen=True)
class CellRow:
    """What one simulation showed.

    Attributes:
        attainment: share of the arrivals that were done in time.
        attainment_by_class: the same of each size.
        refused: share that was refused.
        broken: share of what was let in that was late or dropped.
        met: per arrival, whether it was done in time, as a string of ``0`` and ``1``.
        let_in: likewise, whether it was let in.
    """

    run: CellRun
    num_arrivals: int
    attainment: float
    attainment_by_class: Mapping[str, float]
    refused: float
    broken: float
    met: str
    let_in: str


def run_cell(experiment: CellExperiment, run: CellRun, folder: Path = _HERE) -> CellRow:
    """Simulate one policy, load and seed.

    Args:
        experiment: what is simulated.
        run: which of its simulations.
        folder: of its file, beside which a trace lies.
    """
    return _row(run, simulate_cell(Setting.of(experiment, folder), run))


def simulate_cell(setting: Setting, run: CellRun, watch: Watch | None = None) -> CellResult:
    """Simulate one policy, load and seed; `watch` is told of every run of steps."""
    workload = setting.workload(run.load, run.seed)
    return SimulatedCell(setting.spec(run.policy, run.seed, workload), watch).run(workload)


def _row(run: CellRun, result: CellResult) -> CellRow:
    fates = result.fates
    let_in = [fate for fate in fates if fate.end != "refused"]
    return CellRow(
        run=run,
        num_arrivals=len(fates),
        attainment=result.attainment,
        attainment_by_class=result.attainment_by_class(),
        refused=(len(fates) - len(let_in)) / max(1, len(fates)),
        broken=sum(not fate.is_met for fate in let_in) / max(1, len(let_in)),
        met="".join("01"[fate.is_met] for fate in fates),
        let_in="".join("01"[fate.end != "refused"] for fate in fates),
    )


@dataclass(frozen=True)
class Setting:
    """An experiment's costs, requests and cells.

    Attributes:
        source: what comes.
        pools: with what steps take there in the simulation.
        examples: a request of each size.
    """

    experiment: CellExperiment
    source: CellWorkload
    pools: tuple[PricedPool, ...]
    examples: tuple[RequestView, ...]

    @classmethod
    def of(cls, experiment: CellExperiment, folder: Path = _HERE) -> Setting:
        """Work out a setting.

        Raises:
            ConfigError: a profile or the trace can't be used.
            ValueError: a profile has no steps, or the batching gain leaves nothing of them.
        """
        source = workload_of(experiment, folder)
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
        policies = [self._policy(policy, pool) for pool in self.pools]
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
        )

    def _policy(self, name: str, pool: PricedPool) -> CellPolicy:
        return cell_policy(
            name, cost=pool.cost, examples=self.examples, max_batch=pool.asked.max_batch
        )

    def _pool(self, pool: PricedPool, policy: CellPolicy, workload: Sequence[Arrival]) -> PoolSpec:
        """Return a pool whose replicas know of add-ons what their steps take on average."""
        experiment, asked = self.experiment, pool.asked
        add_ons = AddOnCost(num_kept=experiment.kept_add_ons)
        factor = mean_step_factor(add_ons, [len(one.controlnets) for one in workload])
        has_add_ons = any(one.controlnets or one.loras for one in workload)
        return PoolSpec(
            name=pool.name,
            model=MODEL,
            num_replicas=asked.replicas,
            hardware=Hardware(
                pool.cost,
                noise_cv=experiment.step_noise,
                load_s=pool.load_s,
                add_ons=add_ons if has_add_ons else None,
            ),
            max_batch=asked.max_batch,
            max_in_flight=policy.max_in_flight or asked.max_batch,
            told_cost=times(pool.cost, experiment.told_times * factor),
            policy=policy.steps,
            mtbf_s=math.inf if experiment.mtbf_s is None else experiment.mtbf_s,
            repair_s=experiment.repair_s,
        )
