"""Puts an engine and its runner together around a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.adapters.merging import Merger
from ray_cluster.engine.batch.batch_caps import BatchLimit
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.controlnets.asks import ControlNetBackend
from ray_cluster.engine.controlnets.residuals import NoResiduals
from ray_cluster.engine.controlnets.source import ControlNetResiduals
from ray_cluster.engine.device.cuda_graphs import GraphedExecutor
from ray_cluster.engine.groups.group_engine import GroupEngine
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.engine.step.checkpoints import ExportInterval, StateSink
from ray_cluster.engine.step.mixed_step import LayoutChoice, StepSources
from ray_cluster.engine.step.reuse_steps import ActivationStore
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.policies.baselines.one_size_batches import one_size_batches
from ray_cluster.policies.steps.batch_layout import BatchLayout
from ray_cluster.policies.steps.checkpointing import steps_between_exports
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepPolicy, StepView
from ray_cluster.policies.types import RowView

# what requests on reuse schedules have of their last full step; what is evicted is computed again
_MOST_KEPT_BYTES = 512 << 20
_POLICIES: Mapping[str, StepPolicy] = {"mixed": mixed_batches, "one-size": one_size_batches}


def build_engine(
    model: LoadedModel,
    *,
    max_batch: int | BatchLimit,
    clock: Callable[[], float],
    costs: StepCosts | None = None,
    policy: StepPolicy = mixed_batches,
    layout: LayoutChoice | None = None,
    controls: ControlNetBackend | None = None,
) -> StepEngine:
    """Return a step engine with the model's own batch limits.

    Args:
        model: the loaded stages.
        max_batch: most rows of a step, if memory allows; fixed, or a limit that can be set.
        clock: monotonic seconds.
        costs: what steps are expected to take; corrected by those that are taken.
        policy: which rows step together; the production policy unless another is compared.
        layout: whether sizes share a model call; by their costs unless another is compared.
        controls: ControlNets that requests may name; none unless given.
    """
    costs = costs or StepCosts(clock=clock)
    limit = max_batch if isinstance(max_batch, BatchLimit) else BatchLimit(max_batch)

    def choose(rows: Sequence[RowView], now_s: float) -> Sequence[str]:
        view = StepView(rows, costs.current, limit.most, now_s, model.max_batch_by_size)
        return policy(view).request_ids

    return StepEngine(
        model.executor,
        choose,
        model.tables,
        clock,
        limits=model.max_batch_by_size,
        costs=costs,
        layout=layout,
        sources=StepSources(
            ActivationStore(_MOST_KEPT_BYTES),
            NoResiduals() if controls is None else ControlNetResiduals(controls, clock),
        ),
    )


def build_runner(
    model: LoadedModel,
    pool: PoolConfig,
    *,
    clock: Callable[[], float],
    costs: StepCosts | None = None,
    sink: StateSink | None = None,
    interval: ExportInterval = steps_between_exports,
    controls: ControlNetBackend | None = None,
    merges: bool = False,
) -> EngineRunner:
    """Return a runner for the pool's model, not started yet; see :class:`EngineRunner`.

    Args:
        merges: whether LoRAs may be merged into its weights, if there is memory.
    """
    limit = BatchLimit(pool.max_batch)
    if uses_graphs(pool, model):
        model = replace(model, executor=GraphedExecutor(model.executor))
    engine = build_engine(
        model,
        max_batch=limit,
        clock=clock,
        costs=costs,
        policy=_POLICIES[pool.batches],
        layout=None if pool.layout == "auto" else partial(_always, pool.layout),
        controls=controls,
    )
    spare_bytes = model.memory.spare_bytes
    merger = Merger(engine, model.executor, max_bytes=spare_bytes, clock=clock) if merges else None
    runner = EngineRunner(
        model,
        engine,
        clock=clock,
        num_threads=pool.num_threads,
        max_batch=limit,
        sink=sink,
        interval=interval,
        merger=merger,
    )
    if controls is not None:
        controls.call_when_ready(runner.wake)
    return runner


def build_group_runner(
    model: LoadedModel,
    pool: PoolConfig,
    engine: GroupEngine,
    *,
    clock: Callable[[], float],
    sink: StateSink | None = None,
    interval: ExportInterval = steps_between_exports,
) -> EngineRunner:
    """Return likewise a runner for a group's model, whose stages ask its ranks.

    Args:
        engine: of the same ranks.
    """
    return EngineRunner(
        model,
        engine,
        clock=clock,
        num_threads=pool.num_threads,
        max_batch=BatchLimit(pool.max_batch),
        sink=sink,
        interval=interval,
    )


def uses_graphs(pool: PoolConfig, model: LoadedModel) -> bool:
    """Whether a pool's steps run from CUDA graphs; weights that move in and out cannot."""
    is_on_device = model.executor.device.type == "cuda" and model.memory.verdict != "offload"
    return pool.cuda_graphs == "auto" and is_on_device


def _always(layout: BatchLayout, _num_sizes: int) -> BatchLayout:
    return layout
