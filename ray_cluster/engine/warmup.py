"""The first steps of a replica: they warm the model up and measure what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.starting import start_states
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.policies.types import BatchDecision, StepCost
from ray_cluster.requests import ImageRequest

_NUM_STEPS = 4


def prepare_threads(num_threads: int) -> None:
    """Set this process's torch threads and quieten its model libraries; call before loading."""
    torch.set_num_threads(num_threads)
    diffusers_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def measure_step_cost(
    model: LoadedModel, *, max_batch: int, clock: Callable[[], float]
) -> StepCost:
    """Run a few real steps alone and in a full batch, and fit the linear cost through the medians.

    Images of the default size, without guidance; the first step of each batch is not counted, nor
    is the first image that is decoded.
    """
    profile = model.profile
    size = (profile.default_width_px, profile.default_height_px)
    largest = max(2, min(max_batch, model.max_batch_by_size[size]))
    alone_s, together_s = (_median_step_s(model, rows, clock) for rows in (1, largest))
    megapixels = size[0] * size[1] / 1e6
    per_row_s = max(0.0, (together_s - alone_s) / (largest - 1))
    return StepCost(
        fixed_s=max(0.0, alone_s - per_row_s),
        per_megapixel_s=max(per_row_s, 0.01 * alone_s) / megapixels,
        decode_per_megapixel_s=_median_decode_s(model, clock) / megapixels,
        source="measured",
    )


def _median_step_s(model: LoadedModel, num_rows: int, clock: Callable[[], float]) -> float:
    engine = StepEngine(
        model.executor,
        lambda rows, _now_s: BatchDecision(None, tuple(row.request.request_id for row in rows)),
        model.tables,
        clock,
    )
    with torch.inference_mode():
        requests = [_request(model, index) for index in range(num_rows)]
        for state in start_states(model, requests, now_s=clock()):
            engine.add(state)
        durations_s = [engine.step().duration_s for _ in range(_NUM_STEPS)]
    return statistics.median(durations_s[1:])


def _median_decode_s(model: LoadedModel, clock: Callable[[], float]) -> float:
    profile = model.profile
    shape = model.executor.latent_shape(profile.default_width_px, profile.default_height_px)
    latents = torch.zeros(shape, device=model.executor.device)
    durations_s = []
    with torch.inference_mode():
        for _ in range(_NUM_STEPS):
            started_s = clock()
            # its pixels are on the host: it has waited for the device
            model.decoder.decode([latents])
            durations_s.append(clock() - started_s)
    return statistics.median(durations_s[1:])


def _request(model: LoadedModel, index: int) -> ImageRequest:
    profile = model.profile
    return ImageRequest(
        request_id=f"warm-up-{index}",
        model=profile.model,
        prompt="a circle",
        width_px=profile.default_width_px,
        height_px=profile.default_height_px,
        num_steps=_NUM_STEPS,
        guidance_scale=1.0,
        sampler="ddim",
        seed=index,
    )
