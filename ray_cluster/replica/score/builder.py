"""From a discriminator's configuration to its skill: loaded, measured, joined."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ray_cluster.config.arguments import ScorerArguments
from ray_cluster.config.sections.cascades import DiscriminatorTuning
from ray_cluster.engine.scorers.loading import load_scorer
from ray_cluster.engine.scorers.scorer import Scorer
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.imaging.small_images import small_image
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.measuring import measured_cost
from ray_cluster.replica.score.skill import ScoreSkill
from ray_cluster.requests import SMALL_SIDE_PX

logger = logging.getLogger(__name__)


def build_scorer(
    arguments: ScorerArguments,
    settings: WorkerSettings | None,
    *,
    replica_id: str,
    node: str,
    link: DispatcherLink,
    clock: Callable[[], float],
) -> ScoreSkill:
    """Load a discriminator, measure it, and return its skill, not yet started.

    Raises:
        ConfigError, ModelUnsupported: see :func:`ray_cluster.engine.scorers.loading.load_scorer`.
    """
    started_s = clock()
    given = arguments.discriminator
    tuning = DiscriminatorTuning() if settings is None else settings
    prepare_threads(given.num_threads)
    device = torch.device(given.device)
    scorer = load_scorer(given.model, device, calibration=given.calibration)
    step_cost = measure_scoring(scorer, max_batch=tuning.max_batch, clock=clock)
    logger.info("discriminator %s: scoring %s", given.name, step_cost)
    return ScoreSkill(
        Registration(
            replica_id=replica_id,
            profile=None,
            max_in_flight=tuning.max_in_flight,
            max_batch=tuning.max_batch,
            step_cost=step_cost,
            pool=given.name,
            kind="score",
            served_as=given.name,
            device_type=device_name(device),
            node=node,
            load_s=clock() - started_s,
            arguments=given.model_dump_json(),
        ),
        scorer,
        link=link,
        clock=clock,
        settings=settings,
    )


def measure_scoring(scorer: Scorer, *, max_batch: int, clock: Callable[[], float]) -> StepCost:
    """Return what scoring costs, as a step of images of the size that all are made small to."""
    image = small_image(np.full((SMALL_SIDE_PX, SMALL_SIDE_PX, 3), 127, np.uint8))
    return measured_cost(
        (SMALL_SIDE_PX, SMALL_SIDE_PX),
        lambda count: scorer.score(["a red circle"] * count, [image] * count),
        max_batch=max_batch,
        clock=clock,
    )
