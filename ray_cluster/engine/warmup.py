"""The first steps of a replica: they warm the model up and measure what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.timing import OperationTimer
from ray_cluster.policies.types import StepCost

_REPEATS = 3


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
    timer = OperationTimer(model, clock, _REPEATS)
    alone_s, together_s = (statistics.median(timer.steps_s([size] * n)) for n in (1, largest))
    decode_s = statistics.median(timer.decodes_s(size, 1))
    megapixels = size[0] * size[1] / 1e6
    per_row_s = max(0.0, (together_s - alone_s) / (largest - 1))
    return StepCost(
        fixed_s=max(0.0, alone_s - per_row_s),
        per_megapixel_s=max(per_row_s, 0.01 * alone_s) / megapixels,
        decode_per_megapixel_s=decode_s / megapixels,
        source="measured",
    )
