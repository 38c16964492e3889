"""Runs the simulations of an experiment on replicas of one device each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ray_cluster.errors import ConfigError
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.costs.cost_fit import FittedCost, fit_step_cost
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell.cell import CellResult, CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.cell.experiment import CellExperiment, CellPool, CellRun, SizeShare
from ray_cluster.simulator.cell.policies import CellPolicy, cell_policy
from ray_cluster.simulator.cell.views import CellView, ViewRecorder
from ray_cluster.simulator.cell.workload import MODEL, DrawnWorkload, ReplayedWorkload, example_of
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


@dataclass(frozen=True, slots=True)
class PricedPool:
    """A pool with its costs.

    Attributes:
        name: begins its replicas' names.
        fitted: the profile's cost, with its error.
        cost: what a step takes in the simulation.
        load_s: seconds that a replica loads after a failure.
    """

    name: str
    asked: CellPool
    profile: LatencyProfile
    fitted: FittedCost
    cost: StepCost
    load_s: float


def priced_pools(
    experiment: CellExperiment, examples: Sequence[RequestView]
) -> tuple[PricedPool, ...]:
    """Return an experiment's pools with their costs.

    Args:
        experiment: what is simulated.
        examples: a request of each size, over which a batching gain keeps the mean.

    Raises:
        ConfigError: a profile can't be read, or profiles are of several models.
        ValueError: a profile has no steps, or the gain leaves nothing of them.
    """
    pools, seen = [], Counter[str]()
    for asked in experiment.all_pools:
        profile = load_profile(asked.profile)
        fitted = fit_step_cost(profile)
        cost = with_batching_gain(fitted.cost, examples, experiment.batching_gain)
        load_s = experiment.load_s
        if load_s is None:
            load_s = next((row.seconds for row in profile.of("load")), 0.0)
        seen[asked.profile] += 1
        number = seen[asked.profile]
        name = asked.profile if number == 1 else f"{asked.profile}/{number}"
        if not experiment.pools:
            name = "pool"
        pools.append(PricedPool(name, asked, profile, fitted, times(cost, asked.times), load_s))
    models = {pool.profile.model for pool in pools}
    if len(models) > 1:
        raise ConfigError(
            f"pools: given profiles of {' and '.join(sorted(models))}; allowed are profiles of one "
            "model on several devices"
        )
    return tuple(pools)


def with_batching_gain(cost: StepCost, examples: Sequence[RequestView], gain: float) -> StepCost:
    """Return a cost whose shared part is multiplied by the gain.

    What a request takes alone stays the same on average over the examples, so that with a larger
    shared part batches save more.
    """
    alone_s = sum(step_s(cost, work_of([one])) for one in examples) / len(examples)
    own_s = alone_s - cost.fixed_s
    if gain * cost.fixed_s >= alone_s or own_s <= 0:
        raise ValueError(
            f"a batching gain of {gain:g} leaves nothing of a step to each request; at most "
            f"{alone_s / cost.fixed_s:.2f} is possible here"
        )
    factor = (alone_s - gain * cost.fixed_s) / own_s
    return replace(times(cost, factor), fixed_s=gain * cost.fixed_s)


def times(cost: StepCost, factor: float) -> StepCost:
    """Return a cost whose steps take so many times as long."""
    return replace(
        cost,
        fixed_s=factor * cost.fixed_s,
        per_megapixel_s=factor * cost.per_megapixel_s,
        per_squared_megapixel_s=factor * cost.per_squared_megapixel_s,
        per_further_size_s=factor * cost.per_further_size_s,
    )


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
        return self.source.arrivals(load, seed, self.alone_s)

    @property
    def first_workload(self) -> Sequence[Arrival]:
        return self.workload(self.experiment.loads[0], self.experiment.seeds[0])

    def spec(self, policy: str, seed: int, workload: Sequence[Arrival]) -> CellSpec:
        """Return the cell that runs a policy."""
        policies = [
            cell_policy(
                policy, cost=pool.cost, examples=self.examples, max_batch=pool.asked.max_batch
            )
            for pool in self.pools
        ]
        own, experiment, services = policies[0], self.experiment, None
        way = Way(transport_s=experiment.transport_s) if own.num_services else None
        add_ons: AddOnCost | None = AddOnCost(num_kept=experiment.kept_add_ons, way=way)
        if own.num_services:
            # such an experiment has one pool
            (pool,) = self.pools
            assert add_ons is not None
            services = ServiceSpec(own.num_services, pool.cost, add_ons, pool.asked.max_batch)
        if not any(one.controlnets or one.loras for one in workload):
            add_ons = None
        return CellSpec(
            tuple(
                self._pool(pool, one, add_ons)
                for pool, one in zip(self.pools, policies, strict=True)
            ),
            seed=seed,
            promises_deadlines=own.promises_deadlines,
            when_late=own.when_late,
            most_steps=own.most_steps,
            one_way_s=experiment.one_way_s,
            has_preemption=own.has_preemption,
            services=services,
        )

    def _pool(self, pool: PricedPool, policy: CellPolicy, add_ons: AddOnCost | None) -> PoolSpec:
        """Return a pool; what ControlNets add to a step its replicas report as live ones do."""
        experiment, asked, share = self.experiment, pool.asked, 0.0
        if add_ons is not None:
            share = reported_share(pool.cost, add_ons, self.examples, asked.max_batch)
        return PoolSpec(
            name=pool.name,
            model=MODEL,
            num_replicas=asked.replicas - policy.num_services,
            hardware=Hardware(
                pool.cost, noise_cv=experiment.step_noise, load_s=pool.load_s, add_ons=add_ons
            ),
            max_batch=asked.max_batch,
            max_in_flight=policy.max_in_flight or asked.max_batch,
            reported_cost=replace(times(pool.cost, experiment.told_times), control_share=share),
            policy=policy.steps,
            mtbf_s=math.inf if experiment.mtbf_s is None else experiment.mtbf_s,
            repair_s=experiment.repair_s,
        )
