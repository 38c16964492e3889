"""How the models of a configuration would run here, found out without loading a weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.errors import MODEL_ERRORS, ConfigError
from ray_cluster.policies.costs.gpu_shares import Card
from ray_cluster.policies.costs.memory import MemoryPlan
from ray_cluster.policies.costs.number_formats import NumberFormat
from ray_cluster.requests import ModelProfile


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What one replica of a pool would be.

    Attributes:
        memory: None where only the replica can tell (a GPU's free memory, or what it computes in).
        number_format: likewise.
        sampling_words: how calls are sampled that say nothing, and where that comes from.
    """

    profile: ModelProfile
    memory: MemoryPlan | None
    number_format: NumberFormat | None
    sampling_words: str

    @property
    def memory_words(self) -> str:
        """The memory plan in words."""
        return self.memory.explanation if self.memory else "planned by each replica on its GPU"

    @property
    def format_words(self) -> str:
        """The number format in words."""
        return self.number_format or "bfloat16, or float16 where the GPU has none"


def profile_of(pool: PoolConfig) -> ModelProfile:
    """Return what a pool's model accepts, from its files alone; a hub model is downloaded.

    Raises:
        ConfigError: the model cannot be found, or the pool's sizes do not suit it.
        ModelUnsupported: it is not covered.
    """
    _quieten()
    from ray_cluster.engine.files.folders import is_called
    from ray_cluster.engine.models.loading import inspect_model
    from ray_cluster.engine.pipelines.loading import inspect_pipeline

    with _one_hierarchy(pool):
        return (inspect_pipeline(pool) if is_called(pool) else inspect_model(pool)).profile


def check_gpus(pool: PoolConfig) -> None:
    """Refuse a pool whose replicas need more GPUs than this machine has.

    Raises:
        ConfigError: it says how many there are.
    """
    if pool.num_gpus == 0:
        return
    import torch

    # no CUDA context is made for it
    count = torch.cuda.device_count()
    if pool.reserved_gpus > count:
        raise ConfigError(
            f"a replica needs {pool.reserved_gpus:g} GPU(s), and torch {torch.__version__} finds "
            f"{count} on this machine: set device: cpu and num_gpus: 0, or serve it where there "
            "are enough; 'doctor' says why a GPU is not found"
        )


def plan_pool(pool: PoolConfig, card: Card | None = None) -> PlannedModel:
    """Check a pool's model and plan its memory, as its replicas will.

    A GPU of this machine is not asked: that would keep a CUDA context in this process.

    Args:
        card: the GPU that a pool on one is planned for, if it is known.

    Raises:
        ConfigError, ModelUnsupported: see :func:`profile_of`.
        MemoryRefused: there is no room for it.
    """
    _quieten()
    from ray_cluster.engine.files.folders import is_called
    from ray_cluster.engine.models.loading import inspect_model, plan_model
    from ray_cluster.engine.pipelines.loading import inspect_pipeline
    from ray_cluster.engine.stages.warmup import prepare_threads

    prepare_threads(pool.num_threads)
    card = None if pool.device == "cpu" else card
    number_format = pool.number_format(None if card is None else card.capability)
    is_known = pool.device == "cpu" or card is not None or pool.memory_gib is not None
    with _one_hierarchy(pool):
        if is_called(pool):
            called = inspect_pipeline(pool)
            return PlannedModel(called.profile, called.memory, number_format, called.words)
        model = inspect_model(pool)
        memory = plan_model(pool, model, card) if is_known and number_format is not None else None
    return PlannedModel(model.profile, memory, number_format, model.sampling_words)


def _quieten() -> None:
    """Keep from the terminal what transformers says of other packages as it is imported."""
    from transformers.utils import logging

    logging.set_verbosity_error()


@contextmanager
def _one_hierarchy(pool: PoolConfig) -> Iterator[None]:
    """Turn what nobody foresaw of a model's files into a ConfigError."""
    try:
        yield
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"pool {pool.name}: the model cannot be read ({type(error).__name__}: {error})"
        ) from error
