"""DiffServe's plan: the highest threshold under the demand, every few seconds (section 3.3).

With the variants of its section 4.5: a fixed threshold, batches by additive increase and
multiplicative decrease, and queues estimated as a multiple of the execution. As published, only the
threshold decides, and what can't be in time is dropped.

Two things are kinder than published: demand is counted from arrivals, not from requests in flight,
and the deferral rate of a threshold is calibrated with observed confidences. Without a solution the
last plan stays; before the first one all is light.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.baselines.cascade_choice import (
    THRESHOLDS,
    ArrivalAverage,
    CascadeSizing,
    TwoModels,
    highest_threshold,
    light_alone,
    plan_of,
    two_models,
)
from ray_cluster.policies.cascade import ConfidenceWindow, deferral_rate, observe, window_from
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.policies.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class AimdBatches:
    """Batches of both models, adapted to misses."""

    light: int = 1
    heavy: int = 1


@dataclass(frozen=True, slots=True)
class ThresholdMemory:
    """What the planner remembers between rounds.

    Attributes:
        choice: the last one, if any.
    """

    demand: ArrivalAverage
    num_missed: int
    confidences: ConfidenceWindow
    choice: CascadeSizing | None = None
    batches: AimdBatches = AimdBatches()


@dataclass(frozen=True, slots=True)
class ThresholdPlanner:
    """The published planner.

    Attributes:
        smoothing: weight of the last interval in the moving average.
        demand_factor: for the demand (the paper's lambda).
        wait_by_execution: of each model; None for Little's law on the present queues.
        fixed_threshold: None to maximise it.
        adapts_batches: whether batches follow misses instead of the program.
        most_heavy_batch: largest batch of the heavy model to try.
        window_size: confidences that count.
    """

    fleet: Fleet
    smoothing: float = 0.5
    demand_factor: float = 1.05
    wait_by_execution: float | None = None
    fixed_threshold: float | None = None
    adapts_batches: bool = False
    most_heavy_batch: int = 32
    window_size: int = 600

    def begin(self, state: ClusterState) -> ThresholdMemory:
        models = two_models(self.fleet)
        assert models.service.cascade is not None
        seen = state.service(models.service.name)
        window = window_from(models.service.cascade.deferral, self.window_size)
        average = ArrivalAverage(state.now_s, seen.num_arrived)
        return ThresholdMemory(average, seen.num_missed, window)

    def plan(self, state: ClusterState, memory: ThresholdMemory) -> tuple[Plan, ThresholdMemory]:
        models = two_models(self.fleet)
        memory = self._learn(state, memory, models)
        demand = self.demand_factor * (memory.demand.per_s or 0.0)
        fixed = self.fixed_threshold
        choice = highest_threshold(
            self._pairs(state, memory, models),
            num_gpus=state.num_gpus(models.light.device),
            demand_per_s=demand,
            rate_at=lambda threshold: deferral_rate(memory.confidences, threshold),
            thresholds=THRESHOLDS if fixed is None else (fixed,),
        )
        infeasible = None if choice else "no threshold leaves enough capacity"
        left = memory.choice or light_alone(models, state.num_gpus(models.light.device))
        choice = choice or left
        plan = replace(plan_of(choice, models), infeasible=infeasible)
        return plan, replace(memory, choice=choice)

    def _learn(
        self, state: ClusterState, memory: ThresholdMemory, models: TwoModels
    ) -> ThresholdMemory:
        seen = state.service(models.service.name)
        if state.now_s <= memory.demand.seen_s:
            return memory
        is_late = seen.num_missed > memory.num_missed
        return replace(
            memory,
            demand=memory.demand.observe(state, models.service.name, self.smoothing),
            num_missed=seen.num_missed,
            confidences=observe(memory.confidences, seen.confidences),
            batches=AimdBatches(
                _adapted(memory.batches.light, models.light, is_late=is_late),
                _adapted(memory.batches.heavy, models.heavy, is_late=is_late),
            ),
        )

    def _pairs(
        self, state: ClusterState, memory: ThresholdMemory, models: TwoModels
    ) -> Iterator[tuple[BatchOption, BatchOption]]:
        """Batches that keep the deadline (equation 1)."""
        assert models.service.cascade is not None
        budget_s = models.service.slo_s - models.service.cascade.discriminate_s
        if self.adapts_batches:
            batches = memory.batches
            yield (_option(models.light, batches.light), _option(models.heavy, batches.heavy))
            return
        waits_s = self._waits_s(state, memory, models)
        factor = 1 + (self.wait_by_execution or 0.0)
        for light in models.light.options:
            for heavy in models.heavy.options:
                taken_s = factor * (light.seconds + heavy.seconds) + waits_s
                if taken_s <= budget_s and heavy.batch <= self.most_heavy_batch:
                    yield light, heavy

    def _waits_s(self, state: ClusterState, memory: ThresholdMemory, models: TwoModels) -> float:
        """Queues over arrival rates (Little's law), of both models together."""
        demand = memory.demand.per_s or 0.0
        if self.wait_by_execution is not None or demand <= 0:
            return 0.0
        deferred = demand * (memory.choice.rate if memory.choice else 0.0)
        first_s = state.model(models.light.model).num_waiting / demand
        num_deferred = state.model(models.heavy.model).num_waiting
        return first_s + (num_deferred / deferred if deferred > 0 else 0.0)


def _adapted(batch: int, pool: PoolSpec, *, is_late: bool) -> int:
    """One more without misses, half with some."""
    most = max(one.batch for one in pool.options)
    return max(1, batch // 2) if is_late else min(most, batch + 1)


def _option(pool: PoolSpec, batch: int) -> BatchOption:
    return BatchOption(batch, pool.batch_s(batch))
