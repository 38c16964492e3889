"""Puts an engine and its runner together around a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray_cluster.config import PoolConfig
from ray_cluster.engine.checkpoints import ExportInterval, StateSink
from ray_cluster.engine.events import RunnerEvent
from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.runner import EngineRunner
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.policies.checkpointing import steps_between_exports
from ray_cluster.policies.step_batching import choose_batch
from ray_cluster.policies.types import BatchDecision, RowView


def build_engine(model: LoadedModel, *, clock: Callable[[], float]) -> StepEngine:
    """Return a step engine with the production policy and the model's own batch limits."""
    caps = model.max_batch_by_size

    def policy(rows: Sequence[RowView], now_s: float) -> BatchDecision:
        return choose_batch(rows, max_batch_by_size=caps, now_s=now_s)

    return StepEngine(model.executor, policy, model.tables, clock, limits=caps)


def build_runner(
    model: LoadedModel,
    pool: PoolConfig,
    on_event: Callable[[RunnerEvent], None],
    *,
    clock: Callable[[], float],
    sink: StateSink | None = None,
    interval: ExportInterval = steps_between_exports,
) -> EngineRunner:
    """Return a runner for the pool's model, not started yet; see :class:`EngineRunner`."""
    return EngineRunner(
        model,
        build_engine(model, clock=clock),
        on_event,
        clock=clock,
        num_threads=pool.num_threads,
        max_batch=pool.max_batch,
        sink=sink,
        interval=interval,
    )
