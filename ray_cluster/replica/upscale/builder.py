"""From an upscaler's configuration to its skill: measured, joined."""

from __future__ import annotations

import logging

import numpy as np

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.settings import WorkerSettings, in_force
from ray_cluster.replica.host import Host
from ray_cluster.replica.measuring import measured_cost
from ray_cluster.replica.results import Results
from ray_cluster.replica.upscale.skill import UpscaleSkill
from ray_cluster.requests import OutputSpec
from ray_cluster.storage.blob_store import BlobStore

logger = logging.getLogger(__name__)

_SIDE_PX, _FACTOR = 256, 2
# of an image that nobody has measured
_UNKNOWN = StepCost(fixed_s=0.01, per_megapixel_s=0.2, source="modelled")


def build(arguments: WorkerArguments, settings: WorkerSettings | None, host: Host) -> UpscaleSkill:
    """Measure an upscaler, and return its skill, not yet started."""
    began_s = host.clock()
    (given,) = arguments.upscalers
    given = in_force(given, settings)
    step_cost = _UNKNOWN if host.is_brief else measure_upscaling(host)
    logger.info("upscaler %s: an image %s", given.name, step_cost)
    return UpscaleSkill(
        host.registration("upscale", given, step_cost=step_cost, began_s=began_s),
        host.coder,
        Results(BlobStore(arguments.storage.results)),
        link=host.link,
        clock=host.clock,
        settings=settings,
    )


def measure_upscaling(host: Host) -> StepCost:
    """Return what an image costs, as a step of one of the enlarged size."""
    # as hard to code as photos are, and always the same
    noise = np.random.default_rng(0).integers(0, 256, (_SIDE_PX, _SIDE_PX, 3), np.uint8)
    png, spec = encode_image(noise, OutputSpec(), {}), OutputSpec()

    def enlarge(count: int) -> None:
        coding = [host.coder.enlarge(png, _FACTOR, spec, {}) for _ in range(count)]
        for one in coding:
            one.result()

    size_px = (_FACTOR * _SIDE_PX, _FACTOR * _SIDE_PX)
    return measured_cost(size_px, enlarge, max_batch=2, clock=host.clock)
