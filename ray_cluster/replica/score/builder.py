"""From a discriminator's configuration to its skill: loaded, measured, joined."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.scorers.loading import load_scorer
from ray_cluster.engine.scorers.scorer import Scorer
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.imaging.small_images import small_image
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.settings import WorkerSettings, in_force
from ray_cluster.replica.host import Host
from ray_cluster.replica.measuring import measured_cost
from ray_cluster.replica.score.skill import ScoreSkill
from ray_cluster.requests import SMALL_SIDE_PX

logger = logging.getLogger(__name__)


def build(arguments: WorkerArguments, settings: WorkerSettings | None, host: Host) -> ScoreSkill:
    """Load a discriminator, measure it, and return its skill, not yet started.

    Raises:
        ConfigError, ModelUnsupported: see :func:`ray_cluster.engine.scorers.loading.load_scorer`.
    """
    began_s = host.clock()
    (given,) = arguments.discriminators
    given = in_force(given, settings)
    prepare_threads(given.num_threads)
    device = torch.device(given.device)
    scorer = load_scorer(given.model, device, calibration=given.calibration)
    step_cost = measure_scoring(scorer, max_batch=given.max_batch, clock=host.clock)
    logger.info("discriminator %s: scoring %s", given.name, step_cost)
    registration = host.registration(
        "score", given, step_cost=step_cost, began_s=began_s, device_type=device_name(device)
    )
    return ScoreSkill(registration, scorer, link=host.link, clock=host.clock, settings=settings)


def measure_scoring(scorer: Scorer, *, max_batch: int, clock: Callable[[], float]) -> StepCost:
    """Return what scoring costs, as a step of images of the size that all are made small to."""
    image = small_image(np.full((SMALL_SIDE_PX, SMALL_SIDE_PX, 3), 127, np.uint8))
    return measured_cost(
        (SMALL_SIDE_PX, SMALL_SIDE_PX),
        lambda count: scorer.score(["a red circle"] * count, [image] * count),
        max_batch=max_batch,
        clock=clock,
    )
