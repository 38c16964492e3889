"""How the models of a configuration would run here, found out without loading a weight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ray_cluster.config.pools import PoolConfig
from ray_cluster.errors import MODEL_ERRORS, RayClusterError
from ray_cluster.policies.memory import MemoryPlan
from ray_cluster.process.gc_freeze import uncollected
from ray_cluster.requests import ModelProfile

# what a thread hands on; a model's own files may be damaged in any way
_PLAN_ERRORS: tuple[type[Exception], ...] = (RayClusterError, ImportError, *MODEL_ERRORS)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What one replica of a pool would be.

    Attributes:
        memory: None where only the replica can tell (a GPU's free memory).
    """

    profile: ModelProfile
    memory: MemoryPlan | None

    @property
    def memory_words(self) -> str:
        """The memory plan in words."""
        return self.memory.explanation if self.memory else "planned by each replica on its GPU"


def profile_of(pool: PoolConfig) -> ModelProfile:
    """Return what a pool's model accepts, from its files alone; a hub model is downloaded.

    Raises:
        ConfigError: the model cannot be found, or the pool's sizes do not suit it.
        ModelUnsupported: it is not covered.
    """
    from ray_cluster.engine.loading import inspect_model

    return inspect_model(pool).profile


def plan_pool(pool: PoolConfig) -> PlannedModel:
    """Check a pool's model and plan its memory, as its replicas will.

    The GPU's free memory is not asked for: that would keep a CUDA context in this process.

    Raises:
        ConfigError, ModelUnsupported: see :func:`profile_of`.
        MemoryRefused: there is no room for it.
    """
    from ray_cluster.engine.loading import inspect_model, plan_model
    from ray_cluster.engine.warmup import prepare_threads

    prepare_threads(pool.num_threads)
    model = inspect_model(pool)
    is_plannable = pool.device == "cpu" or pool.memory_gib is not None
    memory = plan_model(pool, model) if is_plannable else None
    return PlannedModel(model.profile, memory)


class PlansInBackground:
    """Plans all pools of a configuration in a thread, while Ray starts.

    The thread ends with the process, even in the middle of a download.
    """

    def __init__(self, pools: Sequence[PoolConfig]) -> None:
        self._plans: Future[list[PlannedModel]] = Future()
        self._pools = pools
        threading.Thread(target=self._run, name="plan", daemon=True).start()

    def result(self) -> list[PlannedModel]:
        """Wait for the plans, in the order of the pools; errors as of :func:`plan_pool`."""
        return self._plans.result()

    def _run(self) -> None:
        try:
            with uncollected():
                from ray_cluster.engine import loading  # noqa: F401
            self._plans.set_result([plan_pool(pool) for pool in self._pools])
        except _PLAN_ERRORS as error:
            self._plans.set_exception(error)
