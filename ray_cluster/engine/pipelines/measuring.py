"""The first calls of a replica: one at the largest size, then what a step costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from ray_cluster.engine.device.device_errors import is_out_of_memory, raise_if_broken
from ray_cluster.engine.pipelines.loading import CalledPipeline, largest_call
from ray_cluster.engine.stages.warmup import other_size
from ray_cluster.errors import MODEL_ERRORS, ConfigError, MemoryRefused
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.policies.edits import reference_size
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest, ModelProfile

logger = logging.getLogger(__name__)

SizePx = tuple[int, int]

_FEW, _MORE, _MOST = 2, 5, 80
# a call's seconds less those of another with half as many steps are the steps', if they are so
# large a share that what else happens on a machine does not hide them
_TELLING = 0.3
_REPEATS = 2
# no measurement makes pixels free
_LEAST_SHARE = 0.01


def check_largest(model: CalledPipeline) -> None:
    """Make one image of the largest size, from as many pictures as may be, so that none runs out
    of memory later.

    Raises:
        ConfigError: the pipeline makes no such image.
        MemoryRefused: it does not fit.
    """
    profile = model.profile
    side = profile.max_px // profile.size_multiple_px * profile.size_multiple_px
    name, what = profile.model, f"its first call, {largest_call(profile)}"
    try:
        # with guidance, which takes more where it is a second row
        trial = _trial(model, (side, side), _FEW, guidance_scale=2.0)
        model.make(trial, lambda: None, _pictures(profile, profile.max_references, side))
    except MODEL_ERRORS as error:
        raise_if_broken(error)
        if is_out_of_memory(error):
            raise MemoryRefused(
                f"{name}: {what}, runs out of memory ({error}): lower max_px, or give it more"
            ) from error
        raise ConfigError(
            f"{name}: {what}, fails ({type(error).__name__}: {error}): set max_px, min_px and "
            "defaults.size to sizes, and max_references to a number, that the pipeline takes"
        ) from error
    if model.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(model.device) / 2**30
        logger.info("%s: %s, took %.2f GiB", name, what, peak)


def measured_cost(model: CalledPipeline, clock: Callable[[], float]) -> StepCost:
    """Return what a step costs without guidance, by calls of two sizes and two numbers of steps."""
    profile = model.profile
    size, other = (profile.default_width_px, profile.default_height_px), other_size(profile)
    sent = _pictures(profile, profile.min_references, max(size))

    def fastest(size_px: SizePx, num_steps: int) -> tuple[float, list[float]]:
        """Return the seconds of a call, and those between ends of steps."""
        calls, between = [], []
        for _ in range(_REPEATS):
            ends = [clock()]
            model.make(_trial(model, size_px, num_steps), partial(_note, ends, clock), sent)
            calls.append(clock() - ends[0])
            between += [later - end for end, later in pairwise(ends[1:])]
        return min(calls), between

    def step_and_rest_s(size_px: SizePx) -> tuple[float, float]:
        num_steps, (call_s, between) = _MORE, fastest(size_px, _MORE)
        while not between:
            num_steps, half_s = 2 * num_steps, call_s
            call_s, _ = fastest(size_px, num_steps)
            if call_s - half_s > _TELLING * call_s or num_steps >= _MOST:
                between = [2 * (call_s - half_s) / num_steps]
        step_s = max(min(between), _LEAST_SHARE * call_s / num_steps)
        return step_s, max(0.0, call_s - num_steps * step_s)

    step_s, rest_s = step_and_rest_s(size)
    seen_px = sum(one.shape[0] * one.shape[1] for one in sent.references)
    made = size[0] * size[1] / 1e6
    megapixels = made + seen_px / 1e6
    per_megapixel_s = step_s / megapixels
    if other != size:
        less = made - other[0] * other[1] / 1e6
        slope = (step_s - step_and_rest_s(other)[0]) / less
        per_megapixel_s = min(max(slope, _LEAST_SHARE * per_megapixel_s), per_megapixel_s)
    return StepCost(
        fixed_s=step_s - per_megapixel_s * megapixels,
        per_megapixel_s=per_megapixel_s,
        # reading the prompt, too: it is outside of the steps
        decode_per_megapixel_s=rest_s / made,
    )


def _note(ends: list[float], clock: Callable[[], float]) -> None:
    ends.append(clock())


def _pictures(profile: ModelProfile, count: int, side_px: int) -> SentPixels:
    """Return so many grey pictures, at most as large as the model sees any."""
    bounds = profile.size_multiple_px, profile.max_reference_px, profile.min_reference_px
    least = profile.min_reference_side_px
    width, height = reference_size((side_px, side_px), *bounds, least_side_px=least)
    return SentPixels(references=(np.full((height, width, 3), 127, np.uint8),) * count)


def _trial(
    model: CalledPipeline, size_px: SizePx, num_steps: int, guidance_scale: float = 1.0
) -> ImageRequest:
    profile = model.profile
    return ImageRequest(
        request_id="trial",
        model=profile.model,
        prompt="a picture",
        negative_prompt=None,
        width_px=size_px[0],
        height_px=size_px[1],
        num_steps=num_steps,
        guidance_scale=guidance_scale if profile.guidance != "none" else 1.0,
        sampler=profile.default_sampler,
        seed=0,
    )
