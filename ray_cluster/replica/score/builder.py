"""From a discriminator's configuration to its agent: loaded, measured, joined."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ray_cluster.config.slices import WorkerArguments, registered
from ray_cluster.engine.scorers.loading import load_scorer
from ray_cluster.engine.scorers.scorer import Scorer
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.imaging.small_images import small_image
from ray_cluster.policies.costs.cost_model import fitted_cost
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.settings import WorkerSettings, in_force
from ray_cluster.replica.score.agent import ScorerAgent
from ray_cluster.requests import SMALL_SIDE_PX

logger = logging.getLogger(__name__)

_REPEATS = 5


def build_scorer(
    arguments: WorkerArguments,
    settings: WorkerSettings | None,
    *,
    replica_id: str,
    node: str,
    link: DispatcherLink,
    clock: Callable[[], float],
) -> ScorerAgent:
    """Load a discriminator, measure it, and return its agent, not yet started.

    Raises:
        ConfigError, ModelUnsupported: see :func:`ray_cluster.engine.scorers.loading.load_scorer`.
    """
    started_s = clock()
    (given,) = arguments.discriminators
    given = in_force(given, settings)
    prepare_threads(given.num_threads)
    device = torch.device(given.device)
    scorer = load_scorer(given.model, device, calibration=given.calibration)
    step_cost = measure_scoring(scorer, max_batch=given.max_batch, clock=clock)
    logger.info("discriminator %s: scoring %s", given.name, step_cost)
    return ScorerAgent(
        Registration(
            replica_id=replica_id,
            profile=None,
            max_in_flight=given.max_in_flight,
            max_batch=given.max_batch,
            step_cost=step_cost,
            pool=given.name,
            kind="score",
            served_as=given.name,
            device_type=device_name(device),
            node=node,
            load_s=clock() - started_s,
            arguments=registered(given),
        ),
        scorer,
        link=link,
        clock=clock,
        settings=settings,
    )


def measure_scoring(scorer: Scorer, *, max_batch: int, clock: Callable[[], float]) -> StepCost:
    """Return what scoring costs, as a step of images of the size that all are made small to.

    The fastest of several is fitted: what else the machine does only makes them slower.
    """
    image = small_image(np.full((SMALL_SIDE_PX, SMALL_SIDE_PX, 3), 127, np.uint8))

    def fastest_s(count: int) -> float:
        found = []
        for _ in range(1 + _REPEATS):
            began_s = clock()
            scorer.score(["a red circle"] * count, [image] * count)
            found.append(clock() - began_s)
        return min(found[1:])

    several = max(2, max_batch)
    return fitted_cost(
        (SMALL_SIDE_PX, SMALL_SIDE_PX),
        alone_s=fastest_s(1),
        together_s=fastest_s(several),
        num_together=several,
    )
