"""The first steps of a replica: they warm the model up and measure what a step costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.timing import OperationTimer, SizePx
from ray_cluster.policies.cost_model import fitted_cost
from ray_cluster.policies.types import StepCost
from ray_cluster.process.machine import cpu_model
from ray_cluster.requests import ImageRequest, ModelProfile

_REPEATS = 6


def prepare_threads(num_threads: int) -> None:
    """Set this process's torch threads and quieten its model libraries; call before loading."""
    torch.set_num_threads(num_threads)
    diffusers_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def device_name(device: torch.device) -> str:
    """Return what a device is, in words: the name of the accelerator, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def measure_step_cost(
    model: LoadedModel, *, max_batch: int, clock: Callable[[], float]
) -> StepCost:
    """Run a few real steps and fit the cost of a step through the fastest of each kind.

    Alone and in a full batch of the default size, and of two sizes together, all without guidance;
    the first step of each batch is not counted, nor is the first image that is decoded. What else
    the machine does only ever makes them slower; the steps of requests correct the figure later.
    """
    profile = model.profile
    size = (profile.default_width_px, profile.default_height_px)
    largest = max(2, min(max_batch, model.max_batch_by_size[size]))
    timer = OperationTimer(model, clock, _REPEATS)

    def fastest_s(sizes: Sequence[SizePx]) -> float:
        return min(timer.steps_s(sizes))

    other = other_size(profile)
    cost = fitted_cost(
        size,
        alone_s=fastest_s([size]),
        together_s=fastest_s([size] * largest),
        num_together=largest,
        beside=None if other == size else (other, fastest_s([size, other])),
    )
    decode_s = min(timer.decodes_s(size, 1))
    return replace(cost, decode_per_megapixel_s=decode_s / (size[0] * size[1] / 1e6))


def warm_up_requests(model: LoadedModel) -> tuple[ImageRequest, ...]:
    """Return images of the kinds of step that a model makes: guided, and with noise of its own."""
    profile = model.profile
    noisy = next((name for name in ("euler_ancestral", "lcm") if name in model.tables.names), None)
    plain = ImageRequest(
        request_id="warm-up-plain",
        model=profile.model,
        prompt="a circle",
        width_px=profile.default_width_px,
        height_px=profile.default_height_px,
        num_steps=2,
        guidance_scale=1.0,
        sampler=noisy or profile.default_sampler,
        seed=0,
        embeds_guidance=profile.guidance == "embedded",
    )
    if profile.guidance != "rows":
        return (plain,)
    return (plain, replace(plain, request_id="warm-up-guided", guidance_scale=2.0))


def other_size(profile: ModelProfile) -> SizePx:
    """Return a size that is not the default one, about half of it if there is such a size."""
    width, height = profile.default_width_px, profile.default_height_px
    half = max(profile.min_px, height // 2 // profile.size_multiple_px * profile.size_multiple_px)
    return (width, half)
