"""From a pool's configuration to a replica's agent: model loaded, step measured, parts joined."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ray_cluster.config.pools import PoolConfig
from ray_cluster.config.sections import StorageConfig
from ray_cluster.engine.building import build_runner
from ray_cluster.engine.folders import resolve_folder
from ray_cluster.engine.loading import load_model
from ray_cluster.engine.step_costs import StepCosts
from ray_cluster.engine.warmup import device_name, measure_step_cost, prepare_threads
from ray_cluster.imaging.encoder import ImageCoder
from ray_cluster.models.digest import model_digest
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Registration
from ray_cluster.replica.agent import ReplicaAgent
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.state_transfer import StateTransfer
from ray_cluster.storage.blob_store import BlobStore

logger = logging.getLogger(__name__)


def build_agent(
    pool: PoolConfig,
    *,
    replica_id: str,
    node: str,
    storage: StorageConfig,
    coder: ImageCoder,
    link: DispatcherLink,
    poll_s: float,
    clock: Callable[[], float],
) -> ReplicaAgent:
    """Load the model of a pool, measure its steps, and return the agent, not yet started.

    Raises:
        ConfigError, ModelUnsupported, MemoryRefused: see
            :func:`ray_cluster.engine.loading.load_model`.
    """
    started_s = clock()
    prepare_threads(pool.num_threads)
    model = load_model(pool)
    digest = model_digest(resolve_folder(pool.model))
    step_cost = measure_step_cost(model, max_batch=pool.max_batch, clock=clock)
    logger.info("pool %s: %s; step %s", pool.name, model.memory.explanation, step_cost)
    states = StateTransfer(BlobStore(storage.states), model_digest=digest)
    return ReplicaAgent(
        Registration(
            replica_id=replica_id,
            profile=model.profile,
            max_in_flight=pool.max_in_flight,
            max_batch=pool.max_batch,
            step_cost=step_cost,
            pool=pool.name,
            device_type=device_name(model.executor.device),
            node=node,
            load_s=clock() - started_s,
            model_digest=digest,
        ),
        make_runner=partial(
            build_runner, model, pool, clock=clock, costs=StepCosts(step_cost), sink=states.writer
        ),
        delivery=Delivery(coder, BlobStore(storage.results)),
        states=states,
        link=link,
        poll_s=poll_s,
        clock=clock,
    )
